/// The fewest transfers with which a sequence of accesses could be served on a device, by whoever knows all of it
/// beforehand: exactly for a few chunks, and a bound below it for any number.
///
/// Chunks are of one size and have a home elsewhere. To use one that is not there costs a transfer; so does giving up
/// the room of one that was written since it came. Both begin and end with the same copies as what they are compared
/// with.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <queue>
#include <unordered_map>
#include <vector>

namespace terrace {

struct OfflineAccess {
  std::size_t chunk = 0;
  bool writes = false;
};

/// What the device holds.
struct OfflineCopies {
  std::vector<bool> resident;  ///< by chunk
  std::vector<bool> dirty;
};

/// By trying all there is, keeping the cheapest way to each state. Of at most 32 chunks; nothing where the end cannot
/// be reached by giving up room only for what is used then.
inline std::optional<std::size_t> fewest_transfers(const std::vector<OfflineAccess>& sequence, int room,
                                                   const OfflineCopies& begin, const OfflineCopies& end) {
  using State = std::uint64_t;  // resident chunks, and above them the dirty ones
  constexpr int half = 32;
  const auto state_of = [](const OfflineCopies& copies) {
    State state = 0;
    for (std::size_t i = 0; i < copies.resident.size(); ++i) {
      state |= State{copies.resident[i]} << i | State{copies.dirty[i]} << (half + i);
    }
    return state;
  };
  std::unordered_map<State, std::size_t> now{{state_of(begin), 0}};
  std::unordered_map<State, std::size_t> next;
  for (const auto& [chunk, writes] : sequence) {
    const State its = State{1} << chunk;
    const State after = its | (writes ? its << half : 0);
    const auto reach = [&](State state, std::size_t transfers) {
      const auto [known, is_new] = next.try_emplace(state | after, transfers);
      if (!is_new) known->second = std::min(known->second, transfers);
    };
    next.clear();
    for (const auto& [state, transfers] : now) {
      const State resident = state & ((State{1} << half) - 1);
      if ((resident & its) != 0) {
        reach(state, transfers);
      } else if (std::popcount(resident) < room) {
        reach(state, transfers + 1);
      } else {
        for (State left = resident; left != 0; left &= left - 1) {
          const State victim = left & -left;
          const bool is_dirty = (state & victim << half) != 0;
          reach(state & ~(victim | victim << half), transfers + (is_dirty ? 2 : 1));
        }
      }
    }
    std::swap(now, next);
  }
  const auto found = now.find(state_of(end));
  return found == now.end() ? std::nullopt : std::optional(found->second);
}

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

/// No way is cheaper. Were nothing kept, every use would cost a transfer and every write another; a copy that is kept
/// from one use to the next spares the first, and the second if it is kept from one write to the next. A part of the
/// second is put down to each of the uses between the two, as though it were spared without the others.
inline double least_transfers(const std::vector<OfflineAccess>& sequence, int room, const OfflineCopies& begin,
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
