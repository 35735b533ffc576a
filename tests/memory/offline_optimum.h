/// The fewest transfers with which a sequence of events could be served on a device, by whoever knows all of it
/// beforehand: exactly for a few chunks, and a bound below it for any number.
///
/// Chunks are of one size and have a home elsewhere. To use one that is not there costs a transfer, unless its bytes
/// begin with that use; so does giving up the room of one that was written since it came, unless its bytes are dead.
/// What is transferred ahead of need, or home before it must be, spares nothing: none of that has to be tried.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

namespace terrace {

struct OfflineEvent {
  enum class What : std::uint8_t {
    use,        ///< on the device
    read_home,  ///< the newest bytes are wanted at home
    write_home  ///< there they are superseded, or dead: a copy on the device is worth nothing
  };

  std::size_t chunk = 0;
  bool writes = false;
  bool begins = false;  ///< there are no bytes to bring
  What what = What::use;
};

/// What the device holds.
struct OfflineCopies {
  std::vector<bool> resident;  ///< by chunk
  std::vector<bool> dirty;
};

/// What a sequence is taken to leave.
enum class OfflineEnd : std::uint8_t {
  alike,  ///< what it is compared with leaves: a copy too few, or dirty in place of clean, costs a transfer
  safe    ///< all bytes at home: each dirty copy costs a transfer
};

/// By trying all there is, remembering the cheapest way from each state. Of at most 32 chunks.
class OfflineOptimum {
 public:
  using State = std::uint64_t;  ///< resident chunks, and above them the dirty ones

  OfflineOptimum(std::vector<OfflineEvent> sequence, int room, OfflineEnd end, const OfflineCopies& alike)
      : sequence_(std::move(sequence)), room_(room), end_(end), alike_(state_of(alike)), known_(sequence_.size()) {}

  static State state_of(const OfflineCopies& copies) {
    State state = 0;
    for (std::size_t i = 0; i < copies.resident.size(); ++i) {
      state |= (copies.resident[i] ? bit(i) : 0) | (copies.dirty[i] ? bit(i) << half : 0);
    }
    return state;
  }
  static bool is_dirty(State state, std::size_t chunk) { return (state & bit(chunk) << half) != 0; }
  static State without(State state, std::size_t chunk) { return state & ~(bit(chunk) | bit(chunk) << half); }

  /// The fewest transfers from the event at `position` to the end.
  std::size_t fewest_from(std::size_t position, State state) {
    if (position == sequence_.size()) return fewest_to_end(state);
    if (const auto known = known_[position].find(state); known != known_[position].end()) return known->second;
    std::size_t fewest = std::numeric_limits<std::size_t>::max();
    for_each_way(position, state, [&](State next, std::size_t transfers, std::optional<std::size_t>) {
      fewest = std::min(fewest, transfers + fewest_from(position + 1, next));
    });
    known_[position].emplace(state, fewest);
    return fewest;
  }

  /// Calls `take(next state, transfers, which chunk gave up its room)` for every way to serve the event.
  template <class Take>
  void for_each_way(std::size_t position, State state, Take&& take) const {
    const OfflineEvent& event = sequence_[position];
    const std::size_t its_write = is_dirty(state, event.chunk) ? 1 : 0;
    if (event.what == OfflineEvent::What::read_home) {
      return take(state & ~(bit(event.chunk) << half), its_write, std::nullopt);
    }
    if (event.what == OfflineEvent::What::write_home) return take(without(state, event.chunk), 0, std::nullopt);
    const State with = bit(event.chunk) | (event.writes ? bit(event.chunk) << half : 0);
    if ((state & bit(event.chunk)) != 0) return take(state | with, 0, std::nullopt);
    const std::size_t fetch = event.begins ? 0 : 1;
    const State residents = state & (bit(half) - 1);
    if (std::popcount(residents) < room_) return take(state | with, fetch, std::nullopt);
    for (State left = residents; left != 0; left &= left - 1) {
      const auto victim = static_cast<std::size_t>(std::countr_zero(left));
      take(without(state, victim) | with, fetch + (is_dirty(state, victim) ? 1 : 0), victim);
    }
  }

 private:
  static constexpr int half = 32;
  static State bit(std::size_t chunk) { return State{1} << chunk; }

  std::size_t fewest_to_end(State state) const {
    const State dirty = state >> half;
    if (end_ == OfflineEnd::safe) return static_cast<std::size_t>(std::popcount(dirty));
    const State lacking = alike_ & ~state & (bit(half) - 1);
    return static_cast<std::size_t>(std::popcount(lacking) + std::popcount(dirty & ~(alike_ >> half)));
  }

  const std::vector<OfflineEvent> sequence_;
  const int room_;
  const OfflineEnd end_;
  const State alike_;
  std::vector<std::unordered_map<State, std::size_t>> known_;  ///< by position
};

/// The most that a choice of weighted intervals is worth of which no more than `room` cover any one slot: a flow of
/// that many units along the slots (Carlisle and Lloyd, On the k-coloring of intervals, 1995).
class IntervalPacking {
 public:
  IntervalPacking(std::size_t slots, int room) : edges_from_(slots + 1), room_(room) {
    for (std::size_t slot = 0; slot < slots; ++slot) add_edge(slot, slot + 1, room, 0);
  }
  void add(std::size_t first, std::size_t end, double worth) { add_edge(first, end, 1, -worth); }

  double most_worth() {
    double cost = 0;
    for (int unit = 0; unit < room_; ++unit) {
      const double of_path = send_one();
      if (of_path >= -kNothing) break;
      cost += of_path;
    }
    return -cost;
  }

 private:
  static constexpr double kNothing = 1e-9;
  struct Edge {
    std::size_t from, to;
    int room;
    double cost;
  };

  void add_edge(std::size_t from, std::size_t to, int room, double cost) {
    edges_from_[from].push_back(edges_.size());
    edges_.push_back({from, to, room, cost});
    edges_from_[to].push_back(edges_.size());
    edges_.push_back({to, from, 0, -cost});
  }

  /// Along the cheapest path.
  double send_one() {
    const std::size_t nodes = edges_from_.size();
    std::vector<double> cost(nodes, std::numeric_limits<double>::infinity());
    std::vector<std::size_t> by(nodes, edges_.size());
    std::vector<bool> queued(nodes, false);
    std::queue<std::size_t> queue;
    cost[0] = 0;
    queue.push(0);
    while (!queue.empty()) {
      const std::size_t node = queue.front();
      queue.pop();
      queued[node] = false;
      for (const std::size_t id : edges_from_[node]) {
        const Edge& edge = edges_[id];
        if (edge.room == 0 || cost[node] + edge.cost >= cost[edge.to] - kNothing) continue;
        cost[edge.to] = cost[node] + edge.cost;
        by[edge.to] = id;
        if (!queued[edge.to]) queue.push(edge.to);
        queued[edge.to] = true;
      }
    }
    for (std::size_t node = nodes - 1; node != 0; node = edges_[by[node]].from) {
      --edges_[by[node]].room;
      ++edges_[by[node] ^ 1U].room;
    }
    return cost[nodes - 1];
  }

  std::vector<std::vector<std::size_t>> edges_from_;
  std::vector<Edge> edges_;
  const int room_;
};

/// No way to serve these uses is cheaper that ends as `end` does. Were nothing kept, every use would cost a transfer
/// and every write another; a copy that is kept from one use to the next spares the first, and the second if it is kept
/// from one write to the next. A part of the second is put down to each of the uses between the two, as though it were
/// spared without the others.
inline double least_transfers(const std::vector<OfflineEvent>& sequence, int room, const OfflineCopies& begin,
                              const OfflineCopies& end) {
  struct Gap {
    std::size_t first, end;  // slots in which the copy is kept beside what is used then
    bool spares_use;
  };
  IntervalPacking packing(sequence.size(), room - 1);
  double transfers = static_cast<double>(sequence.size());
  double spared = 0;
  const auto keep = [&](const Gap& gap, double worth) {
    if (gap.first < gap.end) {
      packing.add(gap.first, gap.end, worth);
    } else {
      spared += worth;
    }
  };
  for (std::size_t chunk = 0; chunk < begin.resident.size(); ++chunk) {
    std::vector<Gap> gaps;  // since the last write, or the beginning
    bool is_dirty = begin.dirty[chunk];
    std::size_t since = 0;
    bool is_there = begin.resident[chunk];
    const auto close = [&](bool spares_write) {
      for (const Gap& gap : gaps) {
        const double write = is_dirty && spares_write ? 1.0 / static_cast<double>(gaps.size()) : 0;
        keep(gap, (gap.spares_use ? 1 : 0) + write);
      }
      transfers += is_dirty ? 1 : 0;
      gaps.clear();
    };
    for (std::size_t at = 0; at < sequence.size(); ++at) {
      if (sequence[at].chunk != chunk) continue;
      if (is_there) gaps.push_back({since, at, true});
      if (sequence[at].writes) {
        close(true);
        is_dirty = true;
      }
      is_there = true;
      since = at + 1;
    }
    const bool stays_dirty = end.resident[chunk] && end.dirty[chunk];
    if (is_there) gaps.push_back({since, sequence.size(), false});
    close(stays_dirty);
  }
  return transfers - spared - packing.most_worth();
}

}  // namespace terrace
