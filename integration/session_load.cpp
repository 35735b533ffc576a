// How a session goes to a checkpoint's state. Nothing changes before all of the checkpoint has been read and found to
// be this session's.

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "base/log.h"
#include "integration/checkpoint_reader.h"
#include "integration/checkpoint_tensors.h"
#include "integration/pause.h"
#include "integration/session_state.h"

namespace terrace {
namespace {

using RecordKind = CheckpointRecord::Kind;

/// Records by what they are of.
using Records = std::map<std::pair<std::string, RecordKind>, const CheckpointRecord*>;

Records records_by_name(const std::vector<CheckpointRecord>& records) {
  Records result;
  for (const CheckpointRecord& record : records) {
    result.emplace(std::pair(record.name, record.kind), &record);
  }
  return result;
}

std::string list_of(const std::vector<std::int64_t>& values) {
  std::string text;
  for (const std::int64_t value : values) {
    text += (text.empty() ? "" : ", ") + std::to_string(value);
  }
  return "[" + text + "]";
}

/// "float32 [3, 4]", and the strides where they tell the difference.
std::string shape_of(const CheckpointRecord& record, bool with_strides) {
  return record.dtype + " " + list_of(record.shape) + (with_strides ? " of strides " + list_of(record.strides) : "");
}

/// What a model and a checkpoint do not have in common.
class Differences {
 public:
  void add(std::string line) {
    if (++count_ <= most_shown) {
      lines_ += "\n  " + std::move(line);
    }
  }
  bool any() const noexcept { return count_ > 0; }
  std::string text() const {
    return lines_ + (count_ > most_shown ? "\n  and " + std::to_string(count_ - most_shown) + " more" : "");
  }

 private:
  static constexpr std::size_t most_shown = 8;

  std::string lines_;
  std::size_t count_ = 0;
};

at::Tensor generator_state_in(const CheckpointReader& reader, const CheckpointRecord& record) {
  const Pause pause;  // the tensor is not the program's
  at::Tensor state = at::empty(record.shape, at::kByte);
  auto* data = static_cast<std::byte*>(state.mutable_data_ptr());
  reader.read(record, [&](std::uint64_t offset) { return std::span(data + offset, state.nbytes() - offset); });
  return state;
}

/// Changes nothing where the state is none of a generator.
void set_default_generator(c10::Device device, const at::Tensor& state) {
  const Pause pause;
  at::Generator generator = default_generator(device);
  const std::scoped_lock lock(generator.mutex());
  try {
    generator.set_state(state);
  } catch (const c10::Error& error) {
    throw CorruptData(std::string("checkpoint: LibTorch refuses the generator's state: ") +
                      error.what_without_backtrace());
  }
}

const CheckpointRecord* record_in(const Records& records, const std::string& name, RecordKind kind) {
  const auto found = records.find({name, kind});
  return found == records.end() ? nullptr : found->second;
}

void warn_of_states_left_out(const std::vector<std::string>& names) {
  constexpr std::size_t most_shown = 3;
  if (names.empty()) {
    return;
  }
  std::string list;
  for (std::size_t i = 0; i < std::min(names.size(), most_shown); ++i) {
    list += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  if (names.size() > most_shown) {
    list += " and " + std::to_string(names.size() - most_shown) + " more";
  }
  log(LogLevel::warning,
      "checkpoint: optimizer states are left out of what needs no gradient now, and lost when it is "
      "trained again: " +
          list + "; to keep them, load before freezing");
}

void load_buffer(const CheckpointReader& reader, const CheckpointRecord& record, const at::Tensor& buffer) {
  if (!buffer.is_cpu()) {
    const at::Tensor copy = on_cpu(buffer);
    load_buffer(reader, record, copy);
    const Pause pause;
    const at::NoGradGuard no_grad;
    buffer.copy_(copy);
    return;
  }
  if (buffer.is_contiguous()) {
    auto* const data = static_cast<std::byte*>(buffer.mutable_data_ptr());
    reader.read(record, [&](std::uint64_t offset) { return std::span(data + offset, buffer.nbytes() - offset); });
    return;
  }
  ElementsPiece piece;
  std::uint64_t copied = 0;
  const auto copy_up_to = [&](std::uint64_t end) {
    copy_in(buffer, copied, std::span(piece).first(end - copied));
    copied = end;
  };
  reader.read(record, [&](std::uint64_t offset) {
    copy_up_to(offset);
    return std::span(piece);
  });
  copy_up_to(record.bytes);
}

}  // namespace

CheckpointNotes SessionState::load(const std::filesystem::path& folder) {
  const auto held = lock();
  require_nothing_gathered("load");
  updates_->settle();
  take_in_replaced();
  const CheckpointReader reader(checkpoint_files(), folder);
  const std::vector<CheckpointRecord>& records = reader.manifest().records;
  require_same_tensors(records);
  std::vector<std::pair<c10::Device, at::Tensor>> generators;
  for (const CheckpointRecord& record : records) {
    if (record.kind == RecordKind::generator) {
      const at::Tensor state = generator_state_in(reader, record);
      for (const c10::Device device : devices_with_generators()) {
        if (default_generator_name(device) == record.name) {
          generators.emplace_back(device, state);
        }
      }
    } else {
      reader.verify(record);
    }
  }
  const auto has = [&](RecordKind kind) {
    return std::any_of(records.begin(), records.end(), [&](const CheckpointRecord& each) { return each.kind == kind; });
  };
  if (has(RecordKind::momentum)) {
    add_optimizer_chunks(has(RecordKind::variance));
  }
  for (const auto& [device, state] : generators) {
    set_default_generator(device, state);
  }
  try {
    load_parameters(reader);
    load_buffers(reader);
  } catch (...) {
    failed_load_ = std::current_exception();
    is_whole_ = false;
    throw;
  }
  is_whole_ = true;
  warn_of_refused_steps();  // what was not taken is not wanted any more
  return reader.manifest().notes;
}

void SessionState::rethrow_failed_load() const {
  const auto held = lock();
  std::rethrow_exception(failed_load_);
}

std::vector<c10::Device> SessionState::devices_with_generators() const {
  std::vector<c10::Device> devices{at::kCPU};
  if (!memory_.program_device().is_cpu()) {
    devices.push_back(memory_.program_device());
  }
  return devices;
}

void SessionState::require_same_tensors(const std::vector<CheckpointRecord>& records) const {
  Records theirs = records_by_name(records);
  std::map<std::string, std::string> tied;
  for (const CheckpointRecord& record : records) {
    for (const std::string& alias : record.aliases) {
      tied.emplace(alias, record.name);
    }
  }
  Differences differences;
  // Whether the checkpoint has the same.
  const auto compare = [&](const CheckpointRecord& ours) {
    const auto found = theirs.find({ours.name, ours.kind});
    if (found == theirs.end()) {
      const auto other = tied.find(ours.name);
      differences.add(describe(ours) + " is not in the checkpoint" +
                      (other == tied.end() ? "" : ", where it is tied to '" + other->second + "'"));
      return false;
    }
    const CheckpointRecord& there = *found->second;
    const bool same_shape = there.dtype == ours.dtype && there.shape == ours.shape;
    const bool is_same = same_shape && there.strides == ours.strides;
    if (!is_same) {
      differences.add(describe(ours) + " is " + shape_of(there, same_shape) + " in the checkpoint and " +
                      shape_of(ours, same_shape) + " in the session");
    }
    theirs.erase(found);
    return is_same;
  };
  for (const ManagedParameter& parameter : parameters_) {
    const bool is_same = compare(record_of(parameter, RecordKind::parameter, state_format_));
    for (const RecordKind kind : {RecordKind::master, RecordKind::momentum, RecordKind::variance}) {
      if (is_same && parameter.gradient_chunk && theirs.contains({parameter.name, kind})) {
        compare(record_of(parameter, kind, state_format_));
      }
    }
  }
  for (const ManagedBuffer& buffer : buffers_) {
    compare(record_of(buffer));
  }
  std::map<std::string, std::int64_t> generator_bytes;
  for (const c10::Device device : devices_with_generators()) {
    generator_bytes.emplace(default_generator_name(device), default_generator_state(device).numel());
  }
  for (const auto& [key, record] : theirs) {
    const bool is_state = record->kind == RecordKind::master || record->kind == RecordKind::momentum ||
                          record->kind == RecordKind::variance;
    const auto generator = generator_bytes.find(record->name);
    const bool is_generator = record->kind == RecordKind::generator && generator != generator_bytes.end() &&
                              record->dtype == "uint8" && record->shape == std::vector{generator->second};
    // That of a device which this session does not have.
    const bool is_left_out = record->kind == RecordKind::generator && record->name == "cuda";
    if (!is_state && !is_generator && !(is_left_out && generator == generator_bytes.end())) {
      differences.add(describe(*record) + " is not in the session");
    }
  }
  if (differences.any()) {
    throw ConfigError("checkpoint: it is not of what the session manages:" + differences.text(),
                      "manage the model that was saved, built with the same options and the same optimizer.states");
  }
}

void SessionState::load_parameters(const CheckpointReader& reader) {
  const Records records = records_by_name(reader.manifest().records);
  std::vector<std::vector<ManagedParameter*>> members(chunk_sets_.size());
  std::vector<std::string> left_out;
  for (ManagedParameter& parameter : parameters_) {
    members[parameter.chunk_set].push_back(&parameter);
    const CheckpointRecord& record = *record_in(records, parameter.name, RecordKind::parameter);
    const std::int64_t updates = record.updates;
    const bool has_states = updates > 0 && chunk_sets_[parameter.chunk_set].momentum;
    if (updates > 0 && !has_states) {
      left_out.push_back(parameter.name);
    }
    parameter.forget_updates();  // the optimizer's end would take the states that come from the checkpoint with it
    if (has_states) {
      *parameter.updates = updates;
      parameter.updated_by = record.updated_by;
    }
  }
  for (std::size_t set = 0; set < members.size(); ++set) {
    for (const RecordKind kind : kinds_in_chunks) {
      const std::optional<ChunkId> chunk = chunk_of(chunk_sets_[set], kind);
      std::vector<std::pair<const ManagedParameter*, const CheckpointRecord*>> loaded;
      for (const ManagedParameter* parameter : members[set]) {
        if (const CheckpointRecord* record = record_in(records, parameter->name, kind)) {
          loaded.emplace_back(parameter, record);
        }
      }
      if (!chunk || loaded.empty()) {
        continue;
      }
      const std::array accesses{ChunkAccess{*chunk, Tier::host, Access::write}};
      const Pin pin = memory_.stream().acquire(accesses, AccessOrigin::beside_program);
      for (const auto& [parameter, record] : loaded) {
        reader.read(*record, [&pin, at = parameter, of = record](std::uint64_t offset) {
          return run_at(pin, *at, *of, offset);
        });
      }
    }
  }
  for (const ManagedParameter& parameter : parameters_) {
    parameter.tensor.unsafeGetTensorImpl()->bump_version();
  }
  warn_of_states_left_out(left_out);
}

void SessionState::load_buffers(const CheckpointReader& reader) {
  const Records records = records_by_name(reader.manifest().records);
  for (const ManagedBuffer& buffer : buffers_) {
    load_buffer(reader, *record_in(records, buffer.name, RecordKind::buffer), buffer.tensor);
    buffer.tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace terrace
