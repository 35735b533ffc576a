// How parameters are laid out in chunks: of which size those are, in which order, and what is lost between them.

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "integration/session_state.h"

namespace terrace {
namespace {

/// A group for each type, with and without gradients.
LayoutRun run_of(const ManagedParameter& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  return {.elements = parameter.elements,
          .element_bytes = static_cast<std::uint32_t>(tensor.element_size()),
          .group = static_cast<std::uint32_t>(tensor.scalar_type()) * 2 + (tensor.requires_grad() ? 1 : 0)};
}

at::ScalarType type_of(const LayoutChunk& chunk) { return static_cast<at::ScalarType>(chunk.group / 2); }

bool is_trainable(const LayoutChunk& chunk) { return chunk.group % 2 == 1; }

}  // namespace

std::uint64_t SessionState::room_of(const LayoutChunk& chunk) const {
  const SetInfo info{.type = type_of(chunk), .elements = chunk.elements, .trainable = is_trainable(chunk)};
  const auto on_device = [&](Kind kind) {
    return memory_.stream().room_bytes(bytes_of(info, kind))[index_of(Tier::device)];
  };
  return update_room(info) + on_device(Kind::parameter) + (info.trainable ? on_device(Kind::gradient) : 0);
}

std::vector<std::vector<ManagedParameter*>> SessionState::lay_out(std::span<ManagedParameter> found,
                                                                  const ModelNotes& notes) {
  std::vector<LayoutRun> runs;
  for (const ManagedParameter& parameter : found) runs.push_back(run_of(parameter));
  if (!config_.placement.chunk && parameters_.empty()) {  // those of other models are of the size found for the first
    chunk_bytes_ = Layout::least_wasteful_chunk(runs, memory_.chunk_bytes(),
                                                [&](const LayoutChunk& chunk) { return room_of(chunk); });
  }
  const Layout layout = Layout::plan(runs, chunk_bytes_);
  const auto first_set = static_cast<std::uint32_t>(set_infos_.size());
  for (const LayoutChunk& chunk : layout.chunks) {
    set_infos_.push_back({.type = type_of(chunk),
                          .elements = chunk.elements,
                          .trainable = is_trainable(chunk),
                          .gradients_read_once = notes.gradients_read_once});
  }
  std::vector<std::vector<ManagedParameter*>> members(layout.chunks.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    const LayoutPlace& place = layout.places[i];
    found[i].chunk_set = first_set + place.chunk;
    found[i].element_offset = place.element_offset;
    members[place.chunk].push_back(&found[i]);
    ++set_infos_[found[i].chunk_set].parameters;
  }
  return members;
}

std::optional<ModelNotes> SessionState::learn_of(const Unlearned& model, bool reads_gradients_again) const {
  const auto first = parameters_.begin() + static_cast<std::ptrdiff_t>(model.first_parameter);
  std::uint64_t accumulations = 0;
  std::for_each_n(first, model.count, [&](const ManagedParameter& parameter) {
    accumulations = std::max(accumulations, parameter.accumulations);
  });
  if (accumulations == 0) return std::nullopt;
  return ModelNotes{.gradients_read_once = accumulations == 1 && !reads_gradients_again};
}

void SessionState::learn_of_models(bool reads_gradients_again) noexcept {
  try {
    const auto held = lock();
    std::erase_if(unlearned_, [&](const Unlearned& model) {
      const std::optional<ModelNotes> learned = learn_of(model, reads_gradients_again);
      if (learned && *learned != model.notes) model.file.save(*learned);
      return learned.has_value();
    });
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("nothing was learned of a model: ") + error.what());
  }
}

void SessionState::note_waste() {
  std::vector<std::uint64_t> used(set_infos_.size(), 0);  // elements
  for (const ManagedParameter& parameter : parameters_) used[parameter.chunk_set] += parameter.elements;
  std::uint64_t room = 0;
  std::uint64_t held = 0;
  memory_.stream().inspect([&](const Policy& policy) {
    for (std::size_t set = 0; set < chunk_sets_.size(); ++set) {
      if (set_infos_[set].parameters == 0) continue;
      const ChunkSet& chunks = chunk_sets_[set];
      for (const auto& id :
           {std::optional(chunks.parameter), chunks.gradient, chunks.master, chunks.momentum, chunks.variance}) {
        if (!id) continue;
        const ChunkInfo& info = policy.chunk(*id).info();
        room += info.room_bytes[index_of(info.home)];
        held += used[set] * (info.bytes / set_infos_[set].elements);
      }
    }
  });
  chunk_room_bytes_ = room;
  chunk_wasted_bytes_ = room - held;
}

MemoryUsage SessionState::memory_usage() const {
  MemoryUsage usage = memory_.stream().usage();
  usage.chunk_bytes = chunk_bytes_;
  usage.block_bytes = memory_.stream().granule_bytes();
  usage.chunk_room_bytes = chunk_room_bytes_;
  usage.chunk_wasted_bytes = chunk_wasted_bytes_;
  return usage;
}

}  // namespace terrace
