// How a session's state goes into a checkpoint: chunk by chunk, from where it lies on the host.

#include <algorithm>
#include <array>
#include <vector>

#include "integration/checkpoint_tensors.h"
#include "integration/checkpoint_writer.h"
#include "integration/optimizer_states.h"
#include "integration/session_state.h"

namespace terrace {
namespace {

using RecordKind = CheckpointRecord::Kind;

void save_buffer(CheckpointWriter& writer, const ManagedBuffer& buffer) {
  writer.begin(record_of(buffer));
  const at::Tensor tensor = on_cpu(buffer.tensor);
  const std::uint64_t bytes = tensor.nbytes();
  if (tensor.is_contiguous()) {
    writer.append({static_cast<const std::byte*>(tensor.const_data_ptr()), bytes});
    return;
  }
  ElementsPiece piece;
  for (std::uint64_t done = 0; done < bytes; done += piece.size()) {
    const auto elements = std::span(piece).first(std::min<std::uint64_t>(piece.size(), bytes - done));
    copy_out(tensor, done, elements);
    writer.append(elements);
  }
}

void save_generator(CheckpointWriter& writer, c10::Device device) {
  const at::Tensor state = default_generator_state(device);
  CheckpointRecord record;
  record.name = default_generator_name(device);
  record.kind = RecordKind::generator;
  record.dtype = "uint8";
  record.shape = {state.numel()};
  record.strides = {1};
  writer.begin(std::move(record));
  writer.append({static_cast<const std::byte*>(state.const_data_ptr()), state.nbytes()});
}

}  // namespace

void SessionState::save(const std::filesystem::path& folder, const CheckpointNotes& notes) {
  const auto held = lock();
  prepare_to_save(notes);
  CheckpointWriter writer(checkpoint_files(), folder);
  save_all(writer, notes);
}

void SessionState::save(CheckpointLock& folder_lock, const CheckpointNotes& notes) {
  const auto held = lock();
  prepare_to_save(notes);
  CheckpointWriter writer(folder_lock);
  save_all(writer, notes);
}

void SessionState::prepare_to_save(const CheckpointNotes& notes) {
  require_nothing_gathered("save");
  require_whole();
  require_notes(notes);
  updates_->finish();
  take_in_replaced();
}

void SessionState::save_all(CheckpointWriter& writer, const CheckpointNotes& notes) const {
  save_parameters(writer);
  for (const ManagedBuffer& buffer : buffers_) {
    save_buffer(writer, buffer);
  }
  for (const c10::Device device : devices_with_generators()) {
    save_generator(writer, device);
  }
  writer.commit(notes);
}

void SessionState::save_parameters(CheckpointWriter& writer) const {
  std::vector<std::vector<const ManagedParameter*>> members(chunk_sets_.size());
  for (const ManagedParameter& parameter : parameters_) {
    members[parameter.chunk_set].push_back(&parameter);
  }
  for (std::size_t set = 0; set < members.size(); ++set) {
    for (const RecordKind kind : kinds_in_chunks) {
      const std::optional<ChunkId> chunk = chunk_of(chunk_sets_[set], kind);
      std::vector<const ManagedParameter*> saved = members[set];
      std::erase_if(saved, [&](const ManagedParameter* parameter) {
        return (kind != RecordKind::parameter && *parameter->updates == 0) ||
               (kind == RecordKind::variance && !keeps_variance(parameter->updated_by));
      });
      if (!chunk || saved.empty()) {
        continue;
      }
      const std::array accesses{ChunkAccess{*chunk, Tier::host, Access::read}};
      const Pin pin = memory_.stream().acquire(accesses, AccessOrigin::beside_program);
      for (const ManagedParameter* parameter : saved) {
        const CheckpointRecord record = record_of(*parameter, kind, state_format_);
        const std::uint64_t bytes = parameter->elements * checkpoint_dtype_bytes(record.dtype).value();
        writer.begin(record);
        for (std::uint64_t done = 0; done < bytes;) {
          const std::span<const std::byte> piece = run_at(pin, *parameter, record, done);
          writer.append(piece);
          done += piece.size();
        }
      }
    }
  }
}

}  // namespace terrace
