// How parameters are laid out in chunks: of which size those are, in which order, and what is lost between them.

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/log.h"
#include "integration/session_state.h"

namespace terrace {
namespace {

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

std::uint64_t SessionState::largest_on_device(const Layout& layout) const {
  std::uint64_t largest = 0;
  for (const LayoutChunk& chunk : layout.chunks) {
    const SetInfo info{.type = type_of(chunk), .elements = chunk.elements};
    for (const Kind kind : {Kind::parameter, Kind::gradient, Kind::master, Kind::momentum, Kind::variance}) {
      largest = std::max(largest, memory_.stream().room_bytes(bytes_of(info, kind))[index_of(Tier::device)]);
    }
  }
  return largest;
}

/// A group for each type, with and without gradients.
LayoutRun SessionState::run_of(const ManagedParameter& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  return {.elements = parameter.elements,
          .element_bytes = static_cast<std::uint32_t>(tensor.element_size()),
          .group = static_cast<std::uint32_t>(tensor.scalar_type()) * 2 + (tensor.requires_grad() ? 1 : 0)};
}

SessionState::ModelLayout SessionState::choose_layout(std::span<const ManagedParameter> found,
                                                      const ModelNotes& notes) const {
  const bool searches = !config_.placement.chunk && parameters_.empty();  // those of other models are of that size
  const auto planned = [&](std::span<const LayoutRun> runs, std::uint64_t most_bytes) {
    ModelLayout made{.layout = {}, .chunk_bytes = most_bytes, .gradients_read_once = notes.gradients_read_once};
    if (searches) {
      made.chunk_bytes =
          Layout::least_wasteful_chunk(runs, most_bytes, [&](const LayoutChunk& chunk) { return room_of(chunk); });
    }
    made.layout = Layout::plan(runs, made.chunk_bytes);
    return made;
  };
  std::vector<LayoutRun> runs;
  for (const ManagedParameter& parameter : found) {
    runs.push_back(run_of(parameter));
  }
  ModelLayout by_construction = planned(runs, searches ? memory_.plan().chunk_bytes : chunk_bytes_.load());
  const bool is_asked_for = config_.placement.order == "use";
  if (!lays_out_by_notes() || notes.order.empty()) {
    if (is_asked_for) {
      log(LogLevel::info, "no order of use is known, or none that is better than that of construction");
    }
    return by_construction;
  }
  std::vector<LayoutRun> in_order;
  for (const std::uint32_t position : notes.order) {
    in_order.push_back(runs[position]);
  }
  ModelLayout by_use = planned(in_order, by_construction.chunk_bytes);
  by_use.layout = std::move(by_use.layout).in_order_of(notes.order);
  by_use.is_by_use = true;
  return is_asked_for || has_room_for(by_use, by_construction, notes) ? by_use : by_construction;
}

bool SessionState::has_room_for(const ModelLayout& by_use, const ModelLayout& by_construction,
                                const ModelNotes& notes) const {
  const auto rooms = [&](const Layout& layout) {
    std::pair<std::uint64_t, std::uint64_t> all_and_largest;
    for (const LayoutChunk& chunk : layout.chunks) {
      const std::uint64_t room = room_of(chunk);
      all_and_largest.first += room;
      all_and_largest.second = std::max(all_and_largest.second, room);
    }
    return all_and_largest;
  };
  const auto [all, largest] = rooms(by_use.layout);
  const auto [most, largest_allowed] = rooms(by_construction.layout);
  const std::uint64_t device = std::min(memory_.budget(Tier::device).capacity(), memory_.plan().device_chunk_limit);
  return all <= most && largest <= largest_allowed &&
         notes.device_bytes + notes.more_in_another_order(largest_on_device(by_use.layout)) <= device;
}

std::vector<std::vector<ManagedParameter*>> SessionState::lay_out(std::span<ManagedParameter> found,
                                                                  const ModelLayout& chosen) {
  chunk_bytes_ = chosen.chunk_bytes;
  is_laid_out_by_use_ = is_laid_out_by_use_ || chosen.is_by_use;
  const auto first_set = static_cast<std::uint32_t>(set_infos_.size());
  for (const LayoutChunk& chunk : chosen.layout.chunks) {
    set_infos_.push_back({.type = type_of(chunk),
                          .elements = chunk.elements,
                          .trainable = is_trainable(chunk),
                          .gradients_read_once = chosen.gradients_read_once});
  }
  std::vector<std::vector<ManagedParameter*>> members(chosen.layout.chunks.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    const LayoutPlace& place = chosen.layout.places[i];
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
  usage.laid_out_by_use = is_laid_out_by_use_;
  usage.chunk_bytes = chunk_bytes_;
  usage.block_bytes = memory_.stream().granule_bytes();
  usage.chunk_room_bytes = chunk_room_bytes_;
  usage.chunk_wasted_bytes = chunk_wasted_bytes_;
  return usage;
}

}  // namespace terrace
