/// Two threads, random events, real bytes: each thread checks what it finds under its pins against what was written
/// there last. TERRACE_TEST_SEED repeats the choices, not their interleaving.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iostream>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "memory/access_stream.h"
#include "tests/memory/seed.h"
#include "tests/memory/stream_world.h"

namespace terrace {
namespace {

constexpr std::uint64_t granule = 4096;
constexpr std::array<std::uint64_t, 4> chunk_sizes{4096, 6000, 12'288, 20'000};
constexpr std::uint64_t largest_room = 20'480;
constexpr std::size_t most_pins = 2;      ///< that one thread holds
constexpr std::size_t most_operands = 3;  ///< of one pin
constexpr std::size_t most_tensors = 2;
constexpr std::uint64_t largest_tensor = 80 * 1024;  ///< small ones and page blocks

constexpr std::uint64_t pinned_at_most = most_pins * most_operands * largest_room;
constexpr std::uint64_t tensors_at_most = most_tensors * largest_tensor;

struct TestChunk {
  ChunkId id = 0;
  std::uint64_t bytes = 0;
  std::uint64_t stamp = 0;  ///< of the last writing
  bool dead = false;        ///< discarded since
  std::mutex* in_use = nullptr;
  bool read_only = false;
};

class Worker {
 public:
  Worker(StreamWorld& world, std::uint64_t number, std::uint64_t seed, std::vector<TestChunk*> chunks)
      : world_(world), number_(number), random_(seed * 2 + number), chunks_(std::move(chunks)) {}

  void run(int events) {
    try {
      for (int event = 0; event < events && !testing::Test::HasFailure(); ++event) {
        while (!try_event()) {
        }
        if (event % 1000 == 999) world_.check_invariants();
      }
      while (!holds_.empty()) release(0);
      while (!tensors_.empty()) free_tensor(0);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "thread " << number_ << ": " << error.what();
    }
  }

  int granted() const { return granted_; }
  int refused() const { return refused_; }
  const std::string& last_refusal() const { return last_refusal_; }

 private:
  struct Operand {
    TestChunk* chunk = nullptr;
    ChunkAccess access;
  };
  struct Hold {
    Pin pin;
    std::vector<Operand> operands;
  };
  struct Tensor {
    std::byte* memory = nullptr;
    std::uint64_t bytes = 0;
    std::uint8_t value = 0;
  };

  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }

  bool try_event() {
    const std::uint64_t choice = below(100);
    if (choice < 40) return holds_.size() < most_pins && acquire();
    if (choice < 80) return !holds_.empty() && release(below(holds_.size()));
    if (choice < 88) return tensors_.size() < most_tensors && allocate_tensor();
    if (choice < 96) return !tensors_.empty() && free_tensor(below(tensors_.size()));
    if (choice < 98) return discard();
    world_.stream.step_mark();
    return true;
  }

  bool held(const TestChunk* chunk) const {
    const auto is_chunk = [&](const Operand& operand) { return operand.chunk == chunk; };
    return std::any_of(holds_.begin(), holds_.end(), [&](const Hold& hold) {
      return std::any_of(hold.operands.begin(), hold.operands.end(), is_chunk);
    });
  }

  bool acquire() {
    Hold hold;
    const std::size_t count = 1 + below(most_operands);
    while (hold.operands.size() < count) {
      TestChunk* chunk = chunks_[below(chunks_.size())];
      const auto is_chunk = [&](const Operand& operand) { return operand.chunk == chunk; };
      if (held(chunk) || std::any_of(hold.operands.begin(), hold.operands.end(), is_chunk) ||
          (chunk->in_use != nullptr && !chunk->in_use->try_lock())) {
        continue;
      }
      hold.operands.push_back({chunk,
                               {.chunk = chunk->id,
                                .tier = below(10) < 7 ? Tier::device : Tier::host,
                                .mode = !chunk->read_only && below(2) == 0 ? Access::write : Access::read}});
    }
    std::vector<ChunkAccess> accesses;
    for (const Operand& operand : hold.operands) accesses.push_back(operand.access);
    try {
      hold.pin = world_.stream.acquire(accesses);
    } catch (const OutOfMemory& error) {
      ++refused_;
      last_refusal_ = error.what();
      unlock(hold);
      return true;
    }
    ++granted_;
    check(hold);
    for (std::size_t i = 0; i < hold.operands.size(); ++i) {
      const auto& [chunk, access] = hold.operands[i];
      if (access.mode == Access::write) {
        chunk->stamp = ++writes_ << 1 | number_;
        chunk->dead = false;
        write_pattern(hold.pin, i, access.tier, chunk->bytes, chunk->stamp);
      }
    }
    holds_.push_back(std::move(hold));
    return true;
  }

  bool release(std::size_t position) {
    Hold hold = std::move(holds_[position]);
    holds_.erase(holds_.begin() + static_cast<std::ptrdiff_t>(position));
    if (below(4) == 0) check(hold);
    hold.pin.release();
    unlock(hold);
    return true;
  }

  void check(const Hold& hold) const {
    for (std::size_t i = 0; i < hold.operands.size(); ++i) {
      const auto& [chunk, access] = hold.operands[i];
      EXPECT_TRUE(chunk->dead || holds_pattern(hold.pin, i, access.tier, chunk->bytes, chunk->stamp))
          << "thread " << number_ << ": chunk " << chunk->id << " on the " << name_of(access.tier);
    }
  }

  static void unlock(const Hold& hold) {
    for (const Operand& operand : hold.operands) {
      if (operand.chunk->in_use != nullptr) operand.chunk->in_use->unlock();
    }
  }

  bool discard() {
    TestChunk* chunk = chunks_[below(chunks_.size())];
    if (chunk->read_only || held(chunk) || (chunk->in_use != nullptr && !chunk->in_use->try_lock())) return false;
    chunk->dead = true;
    world_.stream.discard(chunk->id);
    if (chunk->in_use != nullptr) chunk->in_use->unlock();
    return true;
  }

  bool allocate_tensor() {
    const std::uint64_t bytes = 1 + below(largest_tensor);
    try {
      world_.stream.allocate(world_.device.allocation_bytes(bytes), Kind::activation);
    } catch (const OutOfMemory& error) {
      ++refused_;
      last_refusal_ = error.what();
      return true;
    }
    Tensor tensor{world_.device.allocate(bytes), bytes, static_cast<std::uint8_t>(below(256))};
    std::memset(tensor.memory, tensor.value, bytes);
    tensors_.push_back(tensor);
    return true;
  }

  bool free_tensor(std::size_t position) {
    const Tensor tensor = tensors_[position];
    tensors_.erase(tensors_.begin() + static_cast<std::ptrdiff_t>(position));
    for (const std::uint64_t at : {std::uint64_t{0}, tensor.bytes / 2, tensor.bytes - 1}) {
      EXPECT_EQ(std::to_integer<int>(tensor.memory[at]), tensor.value) << "thread " << number_ << ": a tensor changed";
    }
    world_.device.deallocate(tensor.memory, tensor.bytes);
    world_.stream.free(world_.device.allocation_bytes(tensor.bytes), Kind::activation);
    return true;
  }

  StreamWorld& world_;
  const std::uint64_t number_;
  std::mt19937_64 random_;
  const std::vector<TestChunk*> chunks_;
  std::vector<Hold> holds_;
  std::vector<Tensor> tensors_;
  std::uint64_t writes_ = 0;
  int granted_ = 0;
  int refused_ = 0;
  std::string last_refusal_;
};

struct Outcome {
  int granted = 0;
  int refused = 0;
};

/// `share` of what both threads can hold at once is there besides the homes.
Outcome run_two_threads(bool cuda, int events, double share, std::uint64_t seed) {
  constexpr std::size_t private_chunks = 24;
  constexpr std::size_t read_only_chunks = 8;
  constexpr std::size_t exclusive_chunks = 8;
  constexpr std::size_t all_chunks = 2 * private_chunks + read_only_chunks + exclusive_chunks;
  const auto home_of = [](std::size_t i) { return i % 8 == 0 ? Tier::device : i % 3 == 0 ? Tier::host : Tier::nvme; };
  const auto room_of = [](std::size_t i) { return (chunk_sizes[i % 4] + granule - 1) / granule * granule; };

  std::array<std::uint64_t, tier_count> homes{};
  for (std::size_t i = 0; i < all_chunks; ++i) homes[index_of(home_of(i))] += room_of(i);
  const auto part = [&](std::uint64_t bytes) {
    return static_cast<std::uint64_t>(static_cast<double>(bytes) * share) / granule * granule;
  };
  StreamWorld world({.granule_bytes = granule,
                     .device_bytes = homes[index_of(Tier::device)] + part(2 * (pinned_at_most + tensors_at_most)),
                     .host_bytes = homes[index_of(Tier::host)] + part(2 * pinned_at_most),
                     .nvme_extents = homes[index_of(Tier::nvme)] / granule,
                     .device_chunk_limit = homes[index_of(Tier::device)] + part(2 * pinned_at_most),
                     .cuda = cuda});

  std::array<std::mutex, exclusive_chunks> mutexes;
  std::deque<TestChunk> chunks(all_chunks);
  std::array<std::vector<TestChunk*>, 2> known;
  for (std::size_t i = 0; i < all_chunks; ++i) {
    TestChunk& chunk = chunks[i];
    chunk.bytes = chunk_sizes[i % 4];
    chunk.id = world.stream.add_chunk(all_kinds[i % 5], static_cast<std::uint32_t>(i), chunk.bytes, home_of(i));
    if (i < 2 * private_chunks) {
      known[i % 2].push_back(&chunk);
      continue;
    }
    known[0].push_back(&chunk);
    known[1].push_back(&chunk);
    if (i < 2 * private_chunks + read_only_chunks) {
      chunk.read_only = true;
      chunk.stamp = 1000 + i;
      const Pin pin = world.acquire(chunk.id, Tier::host, Access::write);
      write_pattern(pin, 0, Tier::host, chunk.bytes, chunk.stamp);
    } else {
      chunk.in_use = &mutexes[i - 2 * private_chunks - read_only_chunks];
    }
  }

  std::array<Worker, 2> workers{Worker(world, 0, seed, known[0]), Worker(world, 1, seed, known[1])};
  {
    std::thread other([&] { workers[1].run(events / 2); });
    workers[0].run(events / 2);
    other.join();
  }

  world.check_invariants();
  for (const TestChunk& chunk : chunks) {
    const Pin pin = world.acquire(chunk.id, Tier::host);
    EXPECT_TRUE(chunk.dead || holds_pattern(pin, 0, Tier::host, chunk.bytes, chunk.stamp)) << "chunk " << chunk.id;
  }
  const MemoryUsage usage = world.stream.usage();
  for (const Tier tier : all_tiers) EXPECT_LE(usage.peak(tier), usage.capacity(tier)) << name_of(tier);
  for (const Link link : all_links) EXPECT_GT(usage.moved(link), 0u) << name_of(link);
  EXPECT_EQ(usage.now(Tier::device, Kind::activation), 0u);
  const Outcome outcome{workers[0].granted() + workers[1].granted(), workers[0].refused() + workers[1].refused()};
  std::cout << "  granted " << outcome.granted << ", refused " << outcome.refused << "\n";
  for (const Worker& worker : workers) {
    if (worker.refused() > 0) std::cout << "  such as: " << worker.last_refusal() << "\n";
  }
  return outcome;
}

class AccessStreamThreads : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(On, AccessStreamThreads, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& cuda) { return cuda.param ? "cuda" : "emulated"; });

TEST_P(AccessStreamThreads, two_threads_find_their_bytes_and_are_never_refused_what_the_budgets_cover) {
  const Outcome outcome = run_two_threads(GetParam(), GetParam() ? 20'000 : 100'000, 1.0, test_seed());
  EXPECT_GT(outcome.granted, 1000);
  EXPECT_EQ(outcome.refused, 0);
}

TEST_P(AccessStreamThreads, two_threads_find_their_bytes_where_only_some_requests_fit) {
  const Outcome outcome = run_two_threads(GetParam(), 20'000, 0.3, test_seed());
  EXPECT_GT(outcome.granted, 1000);
  EXPECT_GT(outcome.refused, 0);
}

}  // namespace
}  // namespace terrace
