/// Several threads, random events, real bytes: each thread checks what it finds under its pins against what was written
/// there last, while drives fail now and then, the room that there is for chunks changes, chunks are removed and others
/// added, what is said of the future is often wrong, and one more thread reads what is to be read on arrival.
/// TERRACE_TEST_SEED repeats the choices, not their interleaving; TERRACE_TEST_EVENTS says how many of them the longest
/// of the tests has.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
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

/// Of all of these, what was never written reads as zeros.
constexpr std::array kinds{Kind::parameter, Kind::master, Kind::momentum, Kind::variance};

constexpr std::uint64_t granule = 4096;
constexpr std::array<std::uint64_t, 4> chunk_sizes{4096, 6000, 12'288, 20'000};
constexpr std::uint64_t largest_room = 20'480;
constexpr std::size_t most_pins = 2;      ///< that one thread holds
constexpr std::size_t most_operands = 3;  ///< of one pin
constexpr std::size_t most_tensors = 2;
constexpr std::uint64_t largest_tensor = 80 * 1024;  ///< small ones and page blocks

constexpr std::uint64_t pinned_at_most = most_pins * most_operands * largest_room;
constexpr std::uint64_t tensors_at_most = most_tensors * largest_tensor;
constexpr std::uint64_t other_use_at_most = 64 * 1024;  ///< of the host, by one thread

struct TestChunk {
  ChunkId id = 0;
  std::uint64_t bytes = 0;
  Kind kind = Kind::parameter;
  Tier home = Tier::host;
  std::uint64_t stamp = 0;  ///< of the last writing
  bool dead = false;        ///< discarded since
  bool removed = false;     ///< for good: there was no room for another in its place
  std::mutex* in_use = nullptr;
  bool read_only = false;
};

class Worker {
 public:
  Worker(StreamWorld& world, std::uint64_t number, std::uint64_t seed, std::vector<TestChunk*> chunks)
      : world_(world), number_(number), random_(seed * 2 + number), chunks_(std::move(chunks)) {}

  void run(std::uint64_t events) {
    try {
      for (std::uint64_t event = 0; event < events && !testing::Test::HasFailure(); ++event) {
        while (!try_event()) {
        }
        if (event % 1000 == 999) world_.check_invariants();
      }
      while (!holds_.empty()) release(0);
      while (!tensors_.empty()) free_tensor(0);
      use_host_otherwise(0);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "thread " << number_ << ": " << error.what();
    }
  }

  int granted() const { return granted_; }
  int refused() const { return refused_; }
  /// As bytes could not be brought.
  int failed() const { return failed_; }
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
    if (choice < 78) return !holds_.empty() && release(below(holds_.size()));
    if (choice < 80) {
      world_.stream.set_read_on_arrival(chunks_[below(chunks_.size())]->id, below(8) > 0);
      return true;
    }
    if (choice < 88) return tensors_.size() < most_tensors && allocate_tensor();
    if (choice < 96) return !tensors_.empty() && free_tensor(below(tensors_.size()));
    if (choice < 97) return discard();
    if (choice < 99) return use_host_otherwise(below(other_use_at_most));
    switch (below(8)) {
      case 0: {
        std::vector<ChunkId> announced;
        for (const TestChunk* chunk : chunks_) announced.push_back(chunk->id);
        world_.stream.announce(std::move(announced));
        return true;
      }
      case 1:
        world_.stream.begin_pass(below(3), below(2) == 0 ? ScheduleBook::End::step : ScheduleBook::End::repetition);
        return true;
      case 2: {
        const ChunkId some = chunks_[below(chunks_.size())]->id;
        world_.stream.set_update_queued({&some, 1}, below(2) == 0);
        return true;
      }
      case 3:
        return replace();
      default:
        world_.stream.step_mark();
        return true;
    }
  }

  /// A chunk that no other thread knows goes, and another comes.
  bool replace() {
    const std::size_t position = below(chunks_.size());
    TestChunk& chunk = *chunks_[position];
    if (chunk.read_only || chunk.in_use != nullptr || held(&chunk)) return false;
    world_.stream.remove_chunk(chunk.id);
    try {
      chunk.id = world_.stream.add_chunk(chunk.kind, static_cast<std::uint32_t>(chunk.id), chunk.bytes, chunk.home,
                                         {.in_place_of = chunk.id});
      chunk.stamp = 0;
      chunk.dead = false;
    } catch (const OutOfMemory& error) {
      ++refused_;
      last_refusal_ = error.what();
      chunk.removed = true;
      chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(position));
    }
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
    } catch (const IoError&) {
      ++failed_;
      unlock(hold);
      return true;
    }
    ++granted_;
    check(hold);
    for (std::size_t i = 0; i < hold.operands.size(); ++i) {
      const auto& [chunk, access] = hold.operands[i];
      if (access.mode == Access::write) {
        chunk->stamp = ++writes_ << 3U | number_;
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
      world_.stream.allocate(world_.device.allocation_bytes(bytes), Kind::other);
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
    world_.stream.free(world_.device.allocation_bytes(tensor.bytes), Kind::other);
    return true;
  }

  /// More or less of the host's budget than before: so much is left to chunks.
  bool use_host_otherwise(std::uint64_t bytes) {
    try {
      if (bytes > other_use_) world_.stream.allocate(bytes - other_use_, Kind::other, Tier::host);
    } catch (const OutOfMemory& error) {
      ++refused_;
      last_refusal_ = error.what();
      return true;
    }
    if (bytes < other_use_) world_.stream.free(other_use_ - bytes, Kind::other, Tier::host);
    other_use_ = bytes;
    return true;
  }

  StreamWorld& world_;
  const std::uint64_t number_;
  std::mt19937_64 random_;
  std::vector<TestChunk*> chunks_;
  std::vector<Hold> holds_;
  std::vector<Tensor> tensors_;
  std::uint64_t other_use_ = 0;
  std::uint64_t writes_ = 0;
  int granted_ = 0;
  int refused_ = 0;
  int failed_ = 0;
  std::string last_refusal_;
};

/// Reads what comes to the host and is to be read there, twice: nobody may write it meanwhile.
class Reader {
 public:
  explicit Reader(StreamWorld& world) : world_(world) {}
  ~Reader() { end(); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  /// How many chunks it has read.
  int end() {
    stop_ = true;
    world_.stream.wake_reader();
    if (thread_.joinable()) thread_.join();
    return read_;
  }

 private:
  void run() {
    while (const auto reading = world_.stream.await_reading(stop_)) {
      const std::uint64_t bytes =
          world_.stream.inspect([&](const Policy& policy) { return policy.chunk(reading->chunk()).info().bytes; });
      const auto contents = [&] {  // without what fills up the last granule
        std::vector<std::byte> all;
        for (const std::byte* const piece : reading->host()) {
          all.insert(all.end(), piece, piece + std::min<std::uint64_t>(granule, bytes - all.size()));
        }
        return all;
      };
      const std::vector<std::byte> first = contents();
      EXPECT_EQ(world_.stream.writes(reading->chunk()), reading->writes());
      EXPECT_EQ(contents(), first) << "chunk " << reading->chunk() << " changed while it was read";
      ++read_;
    }
  }

  StreamWorld& world_;
  std::atomic<bool> stop_{false};
  int read_ = 0;
  std::thread thread_{[this] { run(); }};  // last: it uses all of the above
};

struct Setting {
  bool cuda = false;
  std::size_t threads = 2;  ///< at most 8
  std::uint64_t events = 0;
  double share = 1;  ///< of what all threads can hold at once, that is there besides the homes
  std::size_t prefetch_depth = 0;
  bool with_faults = false;
};

struct Outcome {
  int granted = 0;
  int refused = 0;
  int failed = 0;
};

/// Reads fail now and then, and writes so rarely that a chunk is written well before another fails: one that cannot be
/// written back twice in a row ends everything. A block that could not be written is of no use any more.
class PassingFaults {
 public:
  explicit PassingFaults(std::uint64_t seed) : random_(seed) {}

  bool fails(const IoOperation& operation) {
    const bool reads = operation.direction == IoOperation::Direction::read;
    return reads ? random_() % 500 == 0 : ++writes_ % kWritesBetween == 0 && ++failed_writes_ <= kMostFailedWrites;
  }

  static constexpr std::uint64_t kMostFailedWrites = 256;

 private:
  static constexpr std::uint64_t kWritesBetween = 2000;

  std::mt19937_64 random_;
  std::uint64_t writes_ = 0;
  std::uint64_t failed_writes_ = 0;
};

/// What failed on its way before that may still arrive as an error.
Pin acquire_once_healed(StreamWorld& world, ChunkId chunk) {
  try {
    return world.acquire(chunk, Tier::host);
  } catch (const IoError&) {
    return world.acquire(chunk, Tier::host);
  }
}

Outcome run_threads(const Setting& setting, std::uint64_t seed) {
  constexpr std::size_t private_chunks = 24;
  constexpr std::size_t read_only_chunks = 8;
  constexpr std::size_t exclusive_chunks = 8;
  const std::size_t threads = setting.threads;
  const std::size_t all_chunks = threads * private_chunks + read_only_chunks + exclusive_chunks;
  const auto home_of = [](std::size_t i) { return i % 8 == 0 ? Tier::device : i % 3 == 0 ? Tier::host : Tier::nvme; };
  const auto room_of = [](std::size_t i) { return (chunk_sizes[i % 4] + granule - 1) / granule * granule; };

  std::array<std::uint64_t, tier_count> homes{};
  for (std::size_t i = 0; i < all_chunks; ++i) homes[index_of(home_of(i))] += room_of(i);
  const auto part = [&](std::uint64_t bytes) {
    return static_cast<std::uint64_t>(static_cast<double>(threads * bytes) * setting.share) / granule * granule;
  };
  StreamWorld world({.granule_bytes = granule,
                     .device_bytes = homes[index_of(Tier::device)] + part(pinned_at_most + tensors_at_most),
                     .host_bytes = homes[index_of(Tier::host)] + part(pinned_at_most + other_use_at_most),
                     .nvme_extents = homes[index_of(Tier::nvme)] / granule +
                                     (setting.with_faults ? PassingFaults::kMostFailedWrites : 0),
                     .device_chunk_limit = homes[index_of(Tier::device)] + part(pinned_at_most),
                     .prefetch_depth = setting.prefetch_depth,
                     .cuda = setting.cuda});
  PassingFaults faults(seed);
  if (setting.with_faults) {
    world.engine.inject(
        {.fault = Fault::io_error, .when = [&](const IoOperation& operation) { return faults.fails(operation); }});
  }

  std::array<std::mutex, exclusive_chunks> mutexes;
  std::deque<TestChunk> chunks(all_chunks);
  std::vector<std::vector<TestChunk*>> known(threads);
  for (std::size_t i = 0; i < all_chunks; ++i) {
    TestChunk& chunk = chunks[i];
    chunk.bytes = chunk_sizes[i % 4];
    chunk.kind = kinds[i % kinds.size()];
    chunk.home = home_of(i);
    chunk.id = world.stream.add_chunk(chunk.kind, static_cast<std::uint32_t>(i), chunk.bytes, chunk.home);
    if (i < threads * private_chunks) {
      known[i % threads].push_back(&chunk);
      continue;
    }
    for (std::vector<TestChunk*>& of_thread : known) of_thread.push_back(&chunk);
    if (i < threads * private_chunks + read_only_chunks) {
      chunk.read_only = true;
      chunk.stamp = 1000 + i;
      const Pin pin = world.acquire(chunk.id, Tier::host, Access::write);
      write_pattern(pin, 0, Tier::host, chunk.bytes, chunk.stamp);
    } else {
      chunk.in_use = &mutexes[i - threads * private_chunks - read_only_chunks];
    }
  }

  Reader reader(world);
  std::deque<Worker> workers;
  for (std::size_t number = 0; number < threads; ++number) workers.emplace_back(world, number, seed, known[number]);
  {
    std::vector<std::jthread> running;
    for (Worker& worker : workers) running.emplace_back([&] { worker.run(setting.events / threads); });
  }
  for (const TestChunk& chunk : chunks) world.stream.set_read_on_arrival(chunk.id, false);
  EXPECT_GT(reader.end(), 0);
  world.engine.heal();

  world.check_invariants();
  for (const TestChunk& chunk : chunks) {
    if (chunk.removed) continue;
    const Pin pin = acquire_once_healed(world, chunk.id);
    EXPECT_TRUE(chunk.dead || holds_pattern(pin, 0, Tier::host, chunk.bytes, chunk.stamp)) << "chunk " << chunk.id;
  }
  const MemoryUsage usage = world.stream.usage();
  for (const Tier tier : all_tiers) EXPECT_LE(usage.peak(tier), usage.capacity(tier)) << name_of(tier);
  for (const Link link : all_links) EXPECT_GT(usage.moved(link), 0u) << name_of(link);
  EXPECT_EQ(usage.now(Tier::device, Kind::other), 0u);
  EXPECT_EQ(usage.now(Tier::host, Kind::other), TransferService::staging_blocks * granule);
  Outcome outcome;
  for (const Worker& worker : workers) {
    outcome.granted += worker.granted();
    outcome.refused += worker.refused();
    outcome.failed += worker.failed();
  }
  std::cout << "  granted " << outcome.granted << ", refused " << outcome.refused << ", failed " << outcome.failed
            << " with " << world.engine.injected().size() << " faults\n";
  for (const Worker& worker : workers) {
    if (worker.refused() > 0) std::cout << "  such as: " << worker.last_refusal() << "\n";
  }
  return outcome;
}

class AccessStreamThreads : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(On, AccessStreamThreads, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& cuda) { return cuda.param ? "cuda" : "emulated"; });

TEST_P(AccessStreamThreads, two_threads_find_their_bytes_and_are_never_refused_what_the_budgets_cover) {
  const Outcome outcome = run_threads({.cuda = GetParam(), .events = GetParam() ? 20'000U : 100'000U}, test_seed());
  EXPECT_GT(outcome.granted, 1000);
  EXPECT_EQ(outcome.refused, 0);
}

TEST_P(AccessStreamThreads, two_threads_find_their_bytes_where_only_some_requests_fit) {
  const Outcome outcome = run_threads({.cuda = GetParam(), .events = 20'000, .share = 0.3}, test_seed());
  EXPECT_GT(outcome.granted, 1000);
  EXPECT_GT(outcome.refused, 0);
}

TEST(AccessStreamFaultyThreads, four_threads_find_their_bytes_while_drives_fail_and_budgets_change) {
  const char* const given = std::getenv("TERRACE_TEST_EVENTS");
  const std::uint64_t events = given != nullptr ? std::strtoull(given, nullptr, 0) : 40'000;
  const Outcome outcome = run_threads(
      {.threads = 4, .events = events, .share = 0.4, .prefetch_depth = 4, .with_faults = true}, test_seed());
  RecordProperty("granted", std::to_string(outcome.granted));
  RecordProperty("refused", std::to_string(outcome.refused));
  RecordProperty("failed", std::to_string(outcome.failed));
  EXPECT_GT(outcome.granted, 1000);
  EXPECT_GT(outcome.refused, 0);
  EXPECT_GT(outcome.failed, 0);
}

}  // namespace
}  // namespace terrace
