/// How near eviction on demand comes to the offline optimum, in transfers, over random passes that repeat. Nothing is
/// done ahead of need, which trades transfers for time.

#include <algorithm>
#include <cstddef>
#include <iostream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "memory/policy.h"
#include "tests/memory/offline_optimum.h"
#include "tests/memory/seed.h"
#include "tests/memory/simulated_driver.h"

namespace terrace {
namespace {

constexpr int kPasses = 3;

using Pass = std::vector<OfflineAccess>;

struct Setting {
  std::size_t chunks;
  int room;
  Pass pass;
};

/// The policy, with so much room on the device and chunks at home on the host. Nothing is done ahead of need, so that
/// what is transferred is what eviction costs.
class Replay {
 public:
  explicit Replay(const Setting& setting)
      : setting_(setting), driver_({static_cast<std::uint64_t>(setting.room), 2 * setting.chunks, 0}) {
    for (std::size_t i = 0; i < setting.chunks; ++i) {
      driver_.add_chunk({.kind = Kind::parameter,
                         .index = static_cast<std::uint32_t>(i),
                         .bytes = 1,
                         .home = Tier::host,
                         .room_bytes = {1, 1, 1}});
      driver_.write(static_cast<ChunkId>(i), Tier::host);
    }
    driver_.begin_pass(1);
    pass();
    pass();
    begin_ = copies();
    driver_.take_actions();
    for (int i = 0; i < kPasses; ++i) pass();
    const std::vector<Action> actions = driver_.take_actions();
    transfers_ = static_cast<std::size_t>(std::count_if(
        actions.begin(), actions.end(), [](const Action& action) { return action.what == Action::What::move; }));
    end_ = copies();
  }

  std::size_t transfers() const { return transfers_; }

  std::size_t fewest() const {
    const auto found = fewest_transfers(sequence(), setting_.room, begin_, end_);
    if (!found) throw std::logic_error("the policy has given up room that nothing was brought into");
    return *found;
  }
  double bound() const { return least_transfers(sequence(), setting_.room, begin_, end_); }

 private:
  void pass() {
    for (const auto& [chunk, writes] : setting_.pass) {
      driver_.use(static_cast<ChunkId>(chunk), Tier::device, writes ? Access::write : Access::read);
    }
    driver_.step_mark();
  }

  OfflineCopies copies() const {
    OfflineCopies copies;
    for (ChunkId id = 0; id < setting_.chunks; ++id) {
      const bool is_there = driver_.state(id, Tier::device) == CopyState::valid;
      copies.resident.push_back(is_there);
      copies.dirty.push_back(is_there && driver_.state(id, Tier::host) != CopyState::valid);
    }
    return copies;
  }

  std::vector<OfflineAccess> sequence() const {
    std::vector<OfflineAccess> all;
    for (int i = 0; i < kPasses; ++i) all.insert(all.end(), setting_.pass.begin(), setting_.pass.end());
    return all;
  }

  const Setting& setting_;
  SimulatedDriver driver_;
  OfflineCopies begin_, end_;
  std::size_t transfers_ = 0;
};

class Random {
 public:
  explicit Random(std::uint64_t seed) : source_(seed) {}

  std::size_t from_to(std::size_t least, std::size_t most) {
    return std::uniform_int_distribution<std::size_t>(least, most)(source_);
  }

  /// Any chunks in any order, or, as in training, there and back again.
  Setting setting(std::size_t fewest_chunks, std::size_t most_chunks, std::size_t most_writes_percent) {
    Setting setting{.chunks = from_to(fewest_chunks, most_chunks), .room = 0, .pass = {}};
    setting.room = static_cast<int>(from_to(2, setting.chunks - 1));
    const std::size_t writes_percent = from_to(0, most_writes_percent);
    const auto add = [&](std::size_t chunk) { setting.pass.push_back({chunk, from_to(1, 100) <= writes_percent}); };
    if (from_to(0, 1) == 0) {
      for (std::size_t left = from_to(setting.chunks, 4 * setting.chunks); left > 0; --left) {
        add(from_to(0, setting.chunks - 1));
      }
    } else {
      for (std::size_t chunk = 0; chunk < setting.chunks; ++chunk) add(chunk);
      for (std::size_t chunk = setting.chunks; chunk-- > 0;) add(chunk);
    }
    return setting;
  }

 private:
  std::mt19937_64 source_;
};

std::string describe(const Setting& setting) {
  std::ostringstream text;
  text << "room for " << setting.room << ", pass";
  for (const auto& [chunk, writes] : setting.pass) text << " " << chunk << (writes ? "w" : "");
  return text.str();
}

TEST(EvictionOptimum, of_copies_that_are_only_read_it_is_reached) {
  Random random(test_seed());
  for (int round = 0; round < 1'000; ++round) {
    const Setting setting = random.setting(3, 12, 0);
    const Replay replay(setting);
    ASSERT_EQ(replay.transfers(), replay.fewest()) << describe(setting);
  }
}

TEST(EvictionOptimum, of_copies_that_are_written_too_it_is_missed_by_at_most_5_percent_in_all) {
  Random random(test_seed());
  std::size_t transfers = 0;
  std::size_t fewest = 0;
  int apart = 0;
  double furthest = 1;
  constexpr int rounds = 3'000;
  for (int round = 0; round < rounds; ++round) {
    const Setting setting = random.setting(3, 12, 100);
    const Replay replay(setting);
    const std::size_t least = replay.fewest();
    ASSERT_GE(replay.transfers(), least) << describe(setting);
    transfers += replay.transfers();
    fewest += least;
    const double ratio = least == 0 ? 1 : static_cast<double>(replay.transfers()) / static_cast<double>(least);
    apart += ratio > 1.05 ? 1 : 0;
    furthest = std::max(furthest, ratio);
  }
  const double ratio = static_cast<double>(transfers) / static_cast<double>(fewest);
  std::cout << transfers << " transfers, the fewest are " << fewest << ": " << ratio << "; " << apart << " of "
            << rounds << " are more than 5 percent off, the furthest " << furthest << "\n";
  EXPECT_LE(ratio, 1.05);
}

TEST(EvictionOptimum, the_bound_of_flows_is_never_above_it) {
  Random random(test_seed());
  double bounds = 0;
  double fewest = 0;
  for (int round = 0; round < 1'000; ++round) {
    const Setting setting = random.setting(3, 9, 100);
    const Replay replay(setting);
    const auto least = static_cast<double>(replay.fewest());
    ASSERT_LE(replay.bound(), least + 1e-6) << describe(setting);
    bounds += replay.bound();
    fewest += least;
  }
  std::cout << "the bound is " << bounds / fewest << " of the optimum\n";
  EXPECT_GE(bounds, 0.9 * fewest) << "a bound far below says nothing";
}

TEST(EvictionOptimum, of_many_chunks_the_bound_of_flows_is_missed_by_at_most_10_percent) {
  Random random(test_seed());
  double transfers = 0;
  double bounds = 0;
  double furthest = 1;
  for (int round = 0; round < 300; ++round) {
    const Setting setting = random.setting(20, 60, 100);
    const Replay replay(setting);
    const double bound = replay.bound();
    transfers += static_cast<double>(replay.transfers());
    bounds += bound;
    furthest = std::max(furthest, bound == 0 ? 1 : static_cast<double>(replay.transfers()) / bound);
  }
  std::cout << transfers / bounds << " of the bound, at most " << furthest << "\n";
  EXPECT_LE(transfers, 1.10 * bounds);
}

}  // namespace
}  // namespace terrace
