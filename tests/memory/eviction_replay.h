/// Random passes that repeat, and the policy replayed over them: what the tests of how near eviction comes to the
/// offline optimum compare.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "memory/policy.h"
#include "tests/memory/offline_optimum.h"
#include "tests/memory/simulated_driver.h"

namespace terrace {

using OfflinePass = std::vector<OfflineEvent>;

/// Chunks of one byte, and so many of them fit on the device.
struct EvictionSetting {
  std::vector<Kind> kinds;  ///< by chunk
  std::vector<Tier> homes;
  int room = 0;
  OfflinePass pass;

  std::size_t chunks() const { return kinds.size(); }
};

inline std::string describe(const EvictionSetting& setting) {
  std::ostringstream text;
  text << "room for " << setting.room << ", pass";
  for (const OfflineEvent& event : setting.pass) {
    using enum OfflineEvent::What;
    text << " " << event.chunk
         << (event.what == read_home    ? "home"
             : event.what == write_home ? "over"
             : event.begins             ? "b"
             : event.writes             ? "w"
                                        : "");
  }
  return text.str();
}

/// The policy over passes of a setting, once it has come to know them.
class EvictionReplay {
 public:
  struct Event {
    OfflineCopies before;
    std::size_t transfers = 0;  ///< to and from the device
  };

  EvictionReplay(const EvictionSetting& setting, int passes, std::size_t prefetch_depth)
      : setting_(setting), driver_(capacity(setting), SimulatedDriver::unlimited, prefetch_depth) {
    for (std::size_t i = 0; i < setting.chunks(); ++i) {
      driver_.add_chunk({.kind = setting.kinds[i],
                         .index = static_cast<std::uint32_t>(i),
                         .bytes = 1,
                         .home = setting.homes[i],
                         .room_bytes = {1, 1, 1}});
    }
    for (ChunkId id = 0; id < setting.chunks(); ++id) {
      if (setting.kinds[id] != Kind::gradient) driver_.write(id, Tier::host);
    }
    driver_.begin_pass(1);
    for (int i = 0; i < passes_to_learn; ++i) pass();
    events_.clear();
    for (int i = 0; i < passes; ++i) pass();
    end_ = copies();
  }

  const std::vector<Event>& events() const { return events_; }
  const OfflineCopies& begin() const { return events_.front().before; }
  const OfflineCopies& end() const { return end_; }
  std::vector<OfflineEvent> sequence() const {
    std::vector<OfflineEvent> all;
    while (all.size() < events_.size()) all.insert(all.end(), setting_.pass.begin(), setting_.pass.end());
    return all;
  }

  /// Taken to leave what `end` says.
  std::size_t transfers(OfflineEnd end) const {
    std::size_t all = 0;
    for (const Event& event : events_) all += event.transfers;
    const auto dirty = std::count(end_.dirty.begin(), end_.dirty.end(), true);
    return all + (end == OfflineEnd::safe ? static_cast<std::size_t>(dirty) : 0);
  }
  OfflineOptimum optimum(OfflineEnd end) const { return {sequence(), setting_.room, end, end_}; }

 private:
  static constexpr int passes_to_learn = 2;

  /// On the host what rests there fits, and two others.
  static std::array<std::uint64_t, tier_count> capacity(const EvictionSetting& setting) {
    const auto rest = std::count(setting.homes.begin(), setting.homes.end(), Tier::host);
    return {static_cast<std::uint64_t>(setting.room), static_cast<std::uint64_t>(rest) + 2, setting.chunks()};
  }

  void pass() {
    for (const OfflineEvent& event : setting_.pass) {
      driver_.take_actions();
      events_.push_back({copies(), 0});
      carry_out(event);
      count_transfers();
    }
    driver_.take_actions();
    driver_.step_mark();
    driver_.run();
    count_transfers();
  }

  void carry_out(const OfflineEvent& event) {
    const auto chunk = static_cast<ChunkId>(event.chunk);
    switch (event.what) {
      case OfflineEvent::What::use:
        driver_.use(chunk, Tier::device, event.writes ? Access::write : Access::read);
        break;
      case OfflineEvent::What::read_home:
        driver_.read(chunk, Tier::host);
        break;
      case OfflineEvent::What::write_home:
        if (setting_.kinds[event.chunk] == Kind::gradient) {
          driver_.discard(chunk);
        } else {
          driver_.write(chunk, Tier::host);
        }
        break;
    }
    driver_.run();
  }

  /// What the host wants to read of a chunk that is home already may come from the device all the same, by the link
  /// that has less to do: that is none of eviction's.
  void count_transfers() {
    const OfflineEvent& event = setting_.pass[(events_.size() - 1) % setting_.pass.size()];
    Event& counted = events_.back();
    for (const Action& action : driver_.take_actions()) {
      const bool crosses = action.from == Tier::device || action.to == Tier::device;
      const bool is_chosen =
          event.what != OfflineEvent::What::use && action.chunk == event.chunk && !counted.before.dirty[event.chunk];
      counted.transfers += action.what == Action::What::move && crosses && !is_chosen ? 1 : 0;
    }
  }

  /// What is blank was brought by nothing.
  OfflineCopies copies() {
    OfflineCopies copies;
    for (ChunkId id = 0; id < setting_.chunks(); ++id) {
      const bool is_there = driver_.state(id, Tier::device) == CopyState::valid && !driver_.policy().chunk(id).blank;
      const bool is_elsewhere =
          driver_.state(id, Tier::host) == CopyState::valid || driver_.state(id, Tier::nvme) == CopyState::valid;
      copies.resident.push_back(is_there);
      copies.dirty.push_back(is_there && !is_elsewhere);
    }
    return copies;
  }

  const EvictionSetting& setting_;
  SimulatedDriver driver_;
  std::vector<Event> events_;
  OfflineCopies end_;
};

class RandomEvictions {
 public:
  explicit RandomEvictions(std::uint64_t seed) : source_(seed) {}

  struct Percent {
    std::size_t least = 0;
    std::size_t most = 100;
  };

  enum class Order : std::uint8_t { any, there_and_back, either };

  /// Parameters in any order, or there and back again; at home on the host or on NVMe.
  EvictionSetting uses(std::size_t fewest_chunks, std::size_t most_chunks, Percent writes,
                       Order order = Order::either) {
    const std::size_t chunks = from_to(fewest_chunks, most_chunks);
    EvictionSetting setting{.kinds = std::vector(chunks, Kind::parameter),
                            .homes = random_homes(chunks),
                            .room = static_cast<int>(from_to(2, chunks - 1)),
                            .pass = {}};
    const std::size_t writes_percent = from_to(writes.least, writes.most);
    const auto add = [&](std::size_t chunk) {
      setting.pass.push_back({.chunk = chunk, .writes = from_to(1, 100) <= writes_percent});
    };
    const bool goes_back = order == Order::there_and_back || (order == Order::either && from_to(0, 1) == 0);
    if (!goes_back) {
      for (std::size_t left = from_to(chunks, 4 * chunks); left > 0; --left) add(from_to(0, chunks - 1));
    } else {
      for (std::size_t chunk = 0; chunk < chunks; ++chunk) add(chunk);
      for (std::size_t chunk = chunks; chunk-- > 0;) add(chunk);
    }
    return setting;
  }

  /// Forward and backward of some micro-batches, in which gradients begin and are added to, and an update at home,
  /// which they die of.
  EvictionSetting training(std::size_t fewest_layers, std::size_t most_layers, std::size_t most_micro_batches) {
    const std::size_t layers = from_to(fewest_layers, most_layers);
    EvictionSetting setting{.kinds = std::vector(layers, Kind::parameter),
                            .homes = random_homes(2 * layers),
                            .room = static_cast<int>(from_to(2, 2 * layers - 1)),
                            .pass = {}};
    setting.kinds.resize(2 * layers, Kind::gradient);
    const std::size_t micro_batches = from_to(1, most_micro_batches);
    for (std::size_t micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
      for (std::size_t layer = 0; layer < layers; ++layer) setting.pass.push_back({.chunk = layer});
      for (std::size_t layer = layers; layer-- > 0;) {
        setting.pass.push_back({.chunk = layer});
        setting.pass.push_back({.chunk = layers + layer, .writes = true, .begins = micro_batch == 0});
      }
    }
    for (std::size_t layer = 0; layer < layers; ++layer) {
      setting.pass.push_back({.chunk = layers + layer, .what = OfflineEvent::What::read_home});
      setting.pass.push_back({.chunk = layer, .what = OfflineEvent::What::write_home});
      setting.pass.push_back({.chunk = layers + layer, .what = OfflineEvent::What::write_home});
    }
    return setting;
  }

 private:
  std::size_t from_to(std::size_t least, std::size_t most) {
    return std::uniform_int_distribution<std::size_t>(least, most)(source_);
  }
  std::vector<Tier> random_homes(std::size_t chunks) {
    std::vector<Tier> homes(chunks);
    for (Tier& home : homes) home = from_to(0, 2) == 0 ? Tier::nvme : Tier::host;
    return homes;
  }

  std::mt19937_64 source_;
};

}  // namespace terrace
