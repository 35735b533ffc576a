// How parameters are laid out in chunks: of which size those are, in which order, and what is lost between them.

#include <numeric>
#include <utility>

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

void SessionState::note_waste() {
  std::uint64_t held = 0;
  for (const ManagedParameter& parameter : parameters_) {
    const ChunkSet& chunks = chunk_sets_[parameter.chunk_set];
    const SetInfo run{.type = set_infos_[parameter.chunk_set].type, .elements = parameter.elements};
    held += bytes_of(run, Kind::parameter);
    for (const auto& [kind, chunk] :
         {std::pair{Kind::gradient, chunks.gradient}, std::pair{Kind::master, chunks.master},
          std::pair{Kind::momentum, chunks.momentum}, std::pair{Kind::variance, chunks.variance}}) {
      held += chunk ? bytes_of(run, kind) : 0;
    }
  }
  chunk_room_bytes_ = std::accumulate(rested_.begin(), rested_.end(), std::uint64_t{0});
  chunk_wasted_bytes_ = chunk_room_bytes_ - held;
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
