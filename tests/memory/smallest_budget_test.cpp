/// The smallest budget that a program would have done with, as it is told after it has run: against the program run
/// again, on budgets around that one.
///
/// TERRACE_TEST_SEED repeats a run.

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "memory/policy.h"
#include "tests/memory/policy_world.h"
#include "tests/memory/seed.h"
#include "tests/memory/simulated_driver.h"

namespace terrace {
namespace {

using Call = SimulatedDriver::Call;

constexpr std::uint64_t unit = 1024;
constexpr std::uint64_t roomy = 10'000 * unit;

/// What one thread asks for, one thing after the other.
struct Event {
  enum class What : std::uint8_t { acquire, allocate, end, discard, step, announce };

  What what = What::acquire;
  std::vector<ChunkAccess> accesses = {};
  std::uint64_t bytes = 0;
  std::size_t ended = 0;  ///< the event that it ends
  std::vector<ChunkId> chunks = {};
};

struct Program {
  std::vector<ChunkInfo> chunks;
  std::vector<Event> events;
};

/// Draws programs whose steps are alike. Ops within ops hold operands together, and tensors live on while others come
/// and go.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}

  Program program() {
    Program program;
    for (std::uint32_t i = 0; i < 16; ++i) {
      const std::uint64_t bytes = (1 + below(4)) * unit - below(unit);
      const std::uint64_t room = (bytes + unit - 1) / unit * unit;
      const std::uint64_t choice = below(10);
      const Tier home = choice < 1 ? Tier::device : choice < 6 ? Tier::host : Tier::nvme;
      const std::uint64_t on_device = (bytes + unit / 4 - 1) / (unit / 4) * (unit / 4);
      program.chunks.push_back({.kind = all_kinds[below(5)],
                                .index = i,
                                .bytes = bytes,
                                .home = home,
                                .room_bytes = {on_device, room, room}});
    }
    const std::uint64_t step_seed = random_();
    for (int step = 0; step < 3; ++step) {
      random_.seed(step_seed);
      add_step(program);
    }
    return program;
  }

  std::uint64_t below(std::uint64_t end) { return random_() % end; }

 private:
  void add_step(Program& program) {
    for (int i = 0; i < 60; ++i) {
      const std::uint64_t choice = below(100);
      if (choice < 55 && open_.size() < 4) {
        if (auto accesses = draw_accesses(program.chunks.size()); !accesses.empty()) {
          for (const ChunkAccess& access : accesses) ++pins_[access.chunk][index_of(access.tier)];
          open_.push_back(program.events.size());
          program.events.push_back({.what = Event::What::acquire, .accesses = std::move(accesses)});
        }
      } else if (choice < 70 && open_.size() < 8) {
        open_.push_back(program.events.size());
        program.events.push_back({.what = Event::What::allocate, .bytes = 1 + below(3 * unit)});
      } else if (choice < 96 && !open_.empty()) {
        end(program, below(open_.size()));
      } else if (choice < 98) {
        program.events.push_back(
            {.what = Event::What::discard, .chunks = {static_cast<ChunkId>(below(program.chunks.size()))}});
      } else {
        std::vector<ChunkId> chunks(below(12));
        for (ChunkId& chunk : chunks) chunk = static_cast<ChunkId>(below(program.chunks.size()));
        program.events.push_back({.what = Event::What::announce, .chunks = std::move(chunks)});
      }
    }
    while (!open_.empty()) end(program, open_.size() - 1);
    program.events.push_back({.what = Event::What::step});
  }

  /// No chunk on two tiers at once: one of them would change.
  std::vector<ChunkAccess> draw_accesses(std::size_t chunk_count) {
    std::vector<ChunkAccess> accesses(1 + below(4));
    std::map<ChunkId, Tier> tiers;
    for (ChunkAccess& access : accesses) {
      access.chunk = static_cast<ChunkId>(below(chunk_count));
      access.tier = below(4) > 0 ? Tier::device : Tier::host;
      access.mode = below(3) == 0 ? Access::write : Access::read;
      access.tier = tiers.emplace(access.chunk, access.tier).first->second;
      for (const Tier other : all_tiers) {
        if (other != access.tier && pins_[access.chunk][index_of(other)] > 0) return {};
      }
    }
    return accesses;
  }

  void end(Program& program, std::size_t position) {
    const std::size_t ended = open_[position];
    open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(position));
    for (const ChunkAccess& access : program.events[ended].accesses) --pins_[access.chunk][index_of(access.tier)];
    program.events.push_back({.what = Event::What::end, .ended = ended});
  }

  std::mt19937_64 random_;
  std::vector<std::size_t> open_;
  std::map<ChunkId, std::array<int, tier_count>> pins_;
};

struct Outcome {
  bool refused = false;
  std::string error;
  std::array<std::uint64_t, tier_count> needed{};
};

/// Transfers and vacates end in a random order, and as late as they may.
Outcome run(const Program& program, std::array<std::uint64_t, tier_count> capacity, std::size_t prefetch_depth,
            std::uint64_t seed) {
  SimulatedDriver driver(capacity, SimulatedDriver::unlimited, prefetch_depth);
  std::mt19937_64 random(seed);
  Outcome outcome;
  const auto carry_out_one = [&] {
    const std::size_t transfers = driver.in_flight().size();
    const std::size_t chosen = random() % (transfers + driver.unreported_vacates());
    chosen < transfers ? driver.finish(chosen) : driver.report_vacate(chosen - transfers);
  };
  std::vector<Call*> calls(program.events.size(), nullptr);
  const auto await = [&](std::size_t at, Call& call) {
    while (call.waiting()) carry_out_one();
    calls[at] = &call;
    outcome.refused = call.refused();
    outcome.error = call.error_text();
    EXPECT_TRUE(call.granted() || call.refused_with<OutOfMemory>()) << call.error_text();
  };
  try {
    for (const ChunkInfo& chunk : program.chunks) driver.add_chunk(chunk);
  } catch (const OutOfMemory& error) {
    return {.refused = true, .error = error.what()};
  }
  for (std::size_t at = 0; at < program.events.size() && !outcome.refused; ++at) {
    const Event& event = program.events[at];
    switch (event.what) {
      case Event::What::acquire:
        await(at, driver.acquire(event.accesses));
        break;
      case Event::What::allocate:
        await(at, driver.allocate(event.bytes));
        break;
      case Event::What::end:
        driver.release(*calls[event.ended]);
        break;
      case Event::What::discard:
        driver.discard(event.chunks.front());
        break;
      case Event::What::step:
        driver.step_mark();
        break;
      case Event::What::announce:
        driver.announce(event.chunks);
        break;
    }
    while (!driver.idle() && random() % 3 == 0) carry_out_one();
  }
  for (const Tier tier : all_tiers) outcome.needed[index_of(tier)] = driver.budget(tier).needed();
  return outcome;
}

class SmallestBudget : public testing::TestWithParam<std::size_t> {};

TEST_P(SmallestBudget, is_what_was_told_and_a_byte_less_is_refused) {
  const std::size_t prefetch_depth = GetParam();
  Draw draw(test_seed());
  for (int round = 0; round < 60 && !testing::Test::HasFailure(); ++round) {
    const Program program = draw.program();
    const Outcome free = run(program, {roomy, roomy, roomy}, prefetch_depth, draw.below(1000));
    ASSERT_FALSE(free.refused) << free.error;
    for (const Tier tier : {Tier::device, Tier::host}) {
      const auto with = [&](std::uint64_t bytes) {
        std::array<std::uint64_t, tier_count> capacity{roomy, roomy, roomy};
        capacity[index_of(tier)] = bytes;
        return run(program, capacity, prefetch_depth, draw.below(1000));
      };
      const std::uint64_t told = free.needed[index_of(tier)];
      const Outcome tight = with(told);
      EXPECT_FALSE(tight.refused) << name_of(tier) << " of " << told << ": " << tight.error;
      EXPECT_EQ(tight.needed, free.needed) << "it is the same however much room there is";
      EXPECT_TRUE(with(told - 1).refused) << name_of(tier) << " of " << told - 1;
    }
    const Outcome both = run(program, {free.needed[0], free.needed[1], roomy}, prefetch_depth, draw.below(1000));
    EXPECT_FALSE(both.refused) << both.error;
  }
}

TEST_P(SmallestBudget, no_smaller_one_does) {
  Draw draw(test_seed());
  for (int round = 0; round < 5; ++round) {
    const Program program = draw.program();
    const Outcome free = run(program, {roomy, roomy, roomy}, GetParam(), 1);
    std::uint64_t smallest = 0;
    for (std::uint64_t bytes = free.needed[0] + 4 * unit; bytes > 0; bytes -= std::min(bytes, unit / 4)) {
      if (!run(program, {bytes, roomy, roomy}, GetParam(), draw.below(1000)).refused) smallest = bytes;
    }
    EXPECT_GE(smallest, free.needed[0]);
    EXPECT_LT(smallest, free.needed[0] + unit / 4);
  }
}

INSTANTIATE_TEST_SUITE_P(WithPrefetch, SmallestBudget, testing::Values(0, 1, 4, 8));

TEST(SmallestBudgetOf, operands_of_one_op_are_there_together) {
  PolicyWorld world(8, 8);
  const ChunkId first = world.written(host);
  const ChunkId second = world.written(host);
  world.read(first, device);
  world.read(second, device);
  EXPECT_EQ(world.budget(device).needed(), 1 * MiB) << "one after the other";
  Call& both = world.acquire({reads(first), reads(second), reads(first)});
  world.run();
  EXPECT_EQ(world.budget(device).needed(), 2 * MiB);
  world.release(both);
}

TEST(SmallestBudgetOf, tensors_count_beside_the_operands_that_are_held_meanwhile) {
  PolicyWorld world(8, 8);
  const ChunkId chunk = world.written(host);
  Call& tensor = world.allocate(3 * MiB);
  world.read(chunk, device);
  EXPECT_EQ(world.budget(device).needed(), 4 * MiB);
  world.release(tensor);
  Call& other = world.allocate(3 * MiB);
  EXPECT_EQ(world.budget(device).used(), 4 * MiB) << "the chunk is there still";
  EXPECT_EQ(world.budget(device).needed(), 4 * MiB);
  world.release(other);
}

TEST(SmallestBudgetOf, what_rests_on_a_tier_counts_until_it_is_removed) {
  PolicyWorld world(8, 8);
  const ChunkId first = world.fresh(device, 2);
  world.write(first, device);
  EXPECT_EQ(world.budget(device).needed(), 2 * MiB);
  world.remove(first);
  world.run();
  EXPECT_EQ(world.budget(device).held(), 0u);
  world.fresh(device, 1);
  EXPECT_EQ(world.budget(device).held(), 1 * MiB);
  EXPECT_EQ(world.budget(device).needed(), 2 * MiB);
}

TEST(SmallestBudgetOf, what_is_brought_ahead_of_need_does_not_count) {
  SimulatedDriver driver({8 * MiB, 16 * MiB, 0}, SimulatedDriver::unlimited, 4);
  std::vector<ChunkId> chunks = {};
  for (std::uint32_t i = 0; i < 6; ++i) {
    chunks.push_back(driver.add_chunk({.index = i, .bytes = MiB, .home = host, .room_bytes = {MiB, MiB, MiB}}));
    driver.write(chunks.back(), host);
  }
  for (int step = 0; step < 3; ++step) {
    for (const ChunkId chunk : chunks) driver.read(chunk, device);
    driver.step_mark();
    driver.run();
  }
  EXPECT_GT(driver.budget(device).peak(), 4 * MiB);
  EXPECT_EQ(driver.budget(device).needed(), MiB);
}

}  // namespace
}  // namespace terrace
