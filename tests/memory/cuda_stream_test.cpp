/// The access stream over a CUDA device, as a program on a GPU uses it: chunks are touched by work that is issued to a
/// compute stream while they are pinned, and runs when the pins have long gone. What that work finds is compared with
/// what was issued to be written there last. On a driver in software, which is slow at random, and on a GPU.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "memory/access_stream.h"
#include "offload/cuda_device.h"
#include "offload/loaded_cuda_driver.h"
#include "offload/thread_engine.h"
#include "tests/base/temporary_folder.h"
#include "tests/memory/seed.h"
#include "tests/memory/stream_world.h"
#include "tests/offload/software_cuda.h"

namespace terrace {
namespace {

/// Of all of these, what was never written reads as zeros.
constexpr std::array kinds{Kind::parameter, Kind::master, Kind::momentum, Kind::variance};

constexpr std::size_t capacity_in_granules = 24;
constexpr std::size_t largest_chunk_in_granules = 5;
constexpr std::size_t host_granules = 40;
constexpr std::size_t nvme_granules = 80;

/// Host memory whose copies need not wait for the CPU.
class PinnedBytes {
 public:
  PinnedBytes(CudaDriver& driver, std::size_t bytes) : driver_(driver), bytes_(bytes) { driver_.register_host(bytes_); }
  PinnedBytes(const PinnedBytes&) = delete;
  PinnedBytes& operator=(const PinnedBytes&) = delete;
  ~PinnedBytes() { driver_.unregister_host(bytes_); }
  std::byte* data() { return bytes_.data(); }

 private:
  CudaDriver& driver_;
  std::vector<std::byte> bytes_;
};

/// Outlives the device, which records events on it to the end.
struct ComputeStream {
  explicit ComputeStream(CudaDriver& its_driver) : driver(its_driver), stream(driver.create_stream()) {}
  ComputeStream(const ComputeStream&) = delete;
  ComputeStream& operator=(const ComputeStream&) = delete;
  ~ComputeStream() { driver.destroy_stream(stream); }

  CudaDriver& driver;
  const CudaStream stream;
};

/// Granules of an arena, pinned for a device: to go before both, and after whoever copies.
class PinnedGranules {
 public:
  PinnedGranules(Device& device, HostArena& arena)
      : device_(device), granule_bytes_(arena.granule_bytes()), granules_(arena.allocate(host_granules)) {
    for (std::byte* each : granules_) device_.pin({each, granule_bytes_});
    arena.free(granules_);
  }
  PinnedGranules(const PinnedGranules&) = delete;
  PinnedGranules& operator=(const PinnedGranules&) = delete;
  ~PinnedGranules() {
    for (std::byte* each : granules_) device_.unpin({each, granule_bytes_});
  }

 private:
  Device& device_;
  const std::size_t granule_bytes_;
  const std::vector<std::byte*> granules_;
};

/// A random program. What it writes to a chunk is one value throughout.
class RandomProgram {
 public:
  RandomProgram(std::shared_ptr<CudaDriver> driver, std::uint64_t seed)
      : random_(seed), driver_(std::move(driver)), granule_(driver_->granularity()) {
    device_.computes_on(compute_.stream);
    for (std::size_t i = 0; i < 20; ++i) {
      const std::uint64_t bytes = (1 + i % largest_chunk_in_granules) * granule_ - i;
      const Tier home = i % 7 == 0 ? Tier::device : i % 2 == 0 ? Tier::host : Tier::nvme;
      chunks_.push_back(
          {stream_.add_chunk(kinds[i % kinds.size()], static_cast<std::uint32_t>(i), bytes, home), bytes});
    }
  }
  ~RandomProgram() {
    driver_->synchronize(compute_.stream);
    if (beside_bytes_ > 0) give_back_beside();
  }
  RandomProgram(const RandomProgram&) = delete;
  RandomProgram& operator=(const RandomProgram&) = delete;

  void run(int events) {
    for (int event = 0; event < events && !testing::Test::HasFailure(); ++event) {
      const std::uint64_t choice = random_() % 100;
      if (choice < 60) {
        compute();
      } else if (choice < 75) {
        look_on_host();
      } else if (choice < 90) {
        take_or_give_back_beside();
      } else if (choice < 95) {
        discard();
      } else {
        stream_.step_mark();
      }
    }
    check_what_was_seen();
    for (const Chunk& chunk : chunks_) check_on_host(chunk);
    stream_.inspect([](const Policy& policy) { policy.check_invariants(); });
    for (const Link link : all_links) EXPECT_GT(stream_.usage().moved(link), 0u) << name_of(link);
  }
  std::uint64_t capacity() const { return capacity_in_granules * granule_; }

 private:
  struct Chunk {
    ChunkId id;
    std::uint64_t bytes;
    std::byte value{};  ///< that was issued to be written last
    bool dead = false;
  };
  /// What work on the compute stream is to find.
  struct Seen {
    std::uint64_t bytes;
    std::byte expected;
  };

  Pin acquire(const Chunk& chunk, Tier tier, Access mode) {
    const ChunkAccess access{chunk.id, tier, mode};
    return stream_.acquire({&access, 1});
  }
  Chunk& any_chunk() { return chunks_[random_() % chunks_.size()]; }

  void compute() {
    Chunk& chunk = any_chunk();
    const bool writes = random_() % 2 == 0;
    const Pin pin = acquire(chunk, Tier::device, writes ? Access::write : Access::read);
    if (!chunk.dead) {
      if (seen_.size() == most_seen) check_what_was_seen();
      driver_->copy_out(seen_bytes(seen_.size()), pin.device(0), chunk.bytes, compute_.stream);
      seen_.push_back({chunk.bytes, chunk.value});
    }
    if (writes) {
      next_value_ = static_cast<std::byte>(std::to_integer<int>(next_value_) % 255 + 1);
      driver_->fill(pin.device(0), next_value_, chunk.bytes, compute_.stream);
      chunk.value = next_value_;
      chunk.dead = false;
    }
  }
  std::byte* seen_bytes(std::size_t position) {
    return seen_memory_.data() + position * largest_chunk_in_granules * granule_;
  }
  void check_what_was_seen() {
    driver_->synchronize(compute_.stream);
    for (std::size_t i = 0; i < seen_.size(); ++i) {
      EXPECT_TRUE(is_throughout(seen_bytes(i), seen_[i].bytes, seen_[i].expected));
    }
    seen_.clear();
  }

  void look_on_host() {
    Chunk& chunk = any_chunk();
    check_on_host(chunk);
    if (random_() % 2 == 0) return;
    const Pin pin = acquire(chunk, Tier::host, Access::write);
    chunk.value ^= std::byte{0x55};
    chunk.dead = false;
    for_each_part(pin, 0, Tier::host, chunk.bytes, [&](std::byte* place, std::uint64_t, std::uint64_t length) {
      std::memset(place, std::to_integer<int>(chunk.value), length);
    });
  }
  void check_on_host(const Chunk& chunk) {
    const Pin pin = acquire(chunk, Tier::host, Access::read);
    for_each_part(pin, 0, Tier::host, chunk.bytes, [&](std::byte* place, std::uint64_t, std::uint64_t length) {
      EXPECT_TRUE(chunk.dead || is_throughout(place, length, chunk.value)) << "chunk " << chunk.id;
    });
  }
  static bool is_throughout(const std::byte* memory, std::uint64_t bytes, std::byte value) {
    return memory[0] == value && std::memcmp(memory, memory + 1, bytes - 1) == 0;
  }

  /// As LibTorch's pool does: reserve, have room made, take.
  void take_or_give_back_beside() {
    if (beside_bytes_ > 0) {
      give_back_beside();
      return;
    }
    beside_bytes_ = (1 + random_() % 8) * granule_;
    stream_.allocate(beside_bytes_, Kind::other);
    device_.make_room_outside();
    beside_ = driver_->create_memory(beside_bytes_);
  }
  void give_back_beside() {
    driver_->release_memory(beside_);
    stream_.free(beside_bytes_, Kind::other);
    beside_bytes_ = 0;
  }

  void discard() {
    Chunk& chunk = any_chunk();
    chunk.dead = true;
    stream_.discard(chunk.id);
  }

  static constexpr std::size_t most_seen = 16;

  std::mt19937_64 random_;
  const std::shared_ptr<CudaDriver> driver_;
  const std::uint64_t granule_;
  const ComputeStream compute_{*driver_};
  PinnedBytes seen_memory_{*driver_, most_seen* largest_chunk_in_granules* granule_};
  TemporaryFolder folder_;
  ThreadEngine engine_;
  CudaDevice device_{driver_, capacity()};
  HostArena arena_{granule_, TransferService::staging_blocks + host_granules};
  const PinnedGranules pinned_{device_, arena_};
  NvmeStore store_{{folder_.path()}, extent_file_bytes(granule_, nvme_granules), granule_};
  Budget host_{Tier::host, arena_.capacity_bytes()};
  Budget nvme_{Tier::nvme, nvme_granules* granule_};
  AccessStream stream_{{&device_.budget(), &host_, &nvme_}, device_, arena_, &store_, &engine_, {.prefetch_depth = 3}};
  std::vector<Chunk> chunks_;
  std::vector<Seen> seen_;
  std::byte next_value_{};
  CudaMemory beside_{};
  std::uint64_t beside_bytes_ = 0;
};

TEST(CudaStream, work_finds_what_was_issued_before_it_however_late_it_runs) {
  auto driver = std::make_shared<SoftwareCuda>(SoftwareCuda::Options{
      .memory_bytes = 1 << 20, .granule_bytes = 4096, .longest_delay = std::chrono::microseconds(300)});
  RandomProgram program(driver, test_seed());
  program.run(1500);
  EXPECT_LE(driver->peak_physical_bytes(), program.capacity());
}

TEST(CudaStream, work_on_a_gpu_finds_what_was_issued_before_it) {
  std::string why_not;
  std::shared_ptr<CudaDriver> driver = load_cuda_driver(&why_not);
  if (driver == nullptr) GTEST_SKIP() << why_not;
  RandomProgram program(std::move(driver), test_seed());
  program.run(3000);
}

}  // namespace
}  // namespace terrace
