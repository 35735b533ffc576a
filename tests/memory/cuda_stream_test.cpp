/// The access stream over a CUDA device, as a program on a GPU uses it: chunks are touched by kernels, which are issued
/// while the chunks are pinned and run when the pins have long gone. Each kernel checks what it finds against what was
/// issued to be written there last. The driver is in software, and slow at random.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "memory/access_stream.h"
#include "offload/cuda_device.h"
#include "offload/thread_engine.h"
#include "tests/base/temporary_folder.h"
#include "tests/memory/seed.h"
#include "tests/memory/stream_world.h"
#include "tests/offload/software_cuda.h"

namespace terrace {
namespace {

constexpr std::uint64_t granule = 4096;
constexpr std::uint64_t capacity = 24 * granule;

/// A program that computes on a CUDA device, between whose slots and the capacity others take memory too.
class KernelProgram {
 public:
  explicit KernelProgram(std::uint64_t seed) : random_(seed) {
    device_.computes_on(compute_.stream);
    for (std::size_t i = 0; i < 20; ++i) {
      const std::uint64_t bytes = (1 + i % 5) * granule - i;
      const Tier home = i % 7 == 0 ? Tier::device : i % 2 == 0 ? Tier::host : Tier::nvme;
      chunks_.push_back({stream_.add_chunk(all_kinds[i % 5], static_cast<std::uint32_t>(i), bytes, home), bytes});
    }
  }

  void run(int events) {
    for (int event = 0; event < events && wrong_ == 0; ++event) {
      const std::uint64_t choice = random_() % 100;
      if (choice < 60) {
        compute();
      } else if (choice < 75) {
        look_on_host();
      } else if (choice < 90) {
        take_beside();
      } else if (choice < 95) {
        discard();
      } else {
        stream_.step_mark();
      }
    }
  }
  void check_all() {
    for (const Chunk& chunk : chunks_) check_on_host(chunk);
    EXPECT_EQ(wrong_, 0);
    EXPECT_LE(driver_->peak_physical_bytes(), capacity);
    stream_.inspect([](const Policy& policy) { policy.check_invariants(); });
    for (const Link link : all_links) EXPECT_GT(stream_.usage().moved(link), 0u) << name_of(link);
  }

 private:
  /// Outlives the device, which records events on it to the end.
  struct ComputeStream {
    explicit ComputeStream(SoftwareCuda& its_driver) : driver(its_driver), stream(driver.create_stream()) {}
    ComputeStream(const ComputeStream&) = delete;
    ComputeStream& operator=(const ComputeStream&) = delete;
    ~ComputeStream() { driver.destroy_stream(stream); }

    SoftwareCuda& driver;
    const CudaStream stream;
  };
  struct Chunk {
    ChunkId id;
    std::uint64_t bytes;
    std::uint64_t stamp = 0;  ///< of what was issued to be written last
    bool dead = false;
  };

  Chunk& any_chunk() { return chunks_[random_() % chunks_.size()]; }

  /// Issues a kernel that checks one chunk and may write it anew, and lets go of the chunk before the kernel has run.
  void compute() {
    Chunk& chunk = any_chunk();
    const bool writes = random_() % 2 == 0;
    const ChunkAccess access{chunk.id, Tier::device, writes ? Access::write : Access::read};
    const Pin pin = stream_.acquire({&access, 1});
    const std::uint64_t next = writes ? ++stamps_ : chunk.stamp;
    driver_->launch(compute_.stream, {{pin.device(0), chunk.bytes}},
                    [this, memory = pin.device(0), before = chunk, next] {
                      if (!before.dead && !holds(memory, before.bytes, before.stamp)) ++wrong_;
                      if (next != before.stamp) {
                        const std::vector<std::byte> bytes = pattern(next, before.bytes);
                        std::memcpy(memory, bytes.data(), bytes.size());
                      }
                    });
    chunk.stamp = next;
    chunk.dead = chunk.dead && !writes;
  }

  void look_on_host() {
    Chunk& chunk = any_chunk();
    check_on_host(chunk);
    if (random_() % 2 == 0) {
      const ChunkAccess access{chunk.id, Tier::host, Access::write};
      const Pin pin = stream_.acquire({&access, 1});
      chunk.stamp = ++stamps_;
      chunk.dead = false;
      write_pattern(pin, 0, Tier::host, chunk.bytes, chunk.stamp);
    }
  }
  void check_on_host(const Chunk& chunk) {
    const ChunkAccess access{chunk.id, Tier::host, Access::read};
    const Pin pin = stream_.acquire({&access, 1});
    if (!chunk.dead && !holds_pattern(pin, 0, Tier::host, chunk.bytes, chunk.stamp)) ++wrong_;
  }

  /// As LibTorch's pool: reserves, has room made, takes.
  void take_beside() {
    if (beside_bytes_ == 0) {
      const std::uint64_t bytes = (1 + random_() % 8) * granule;
      stream_.allocate(bytes, Kind::other);
      device_.make_room_outside();
      driver_->take_beside(bytes);
      beside_bytes_ = bytes;
    } else {
      give_back_beside();
    }
  }
  void give_back_beside() {
    driver_->give_back_beside(beside_bytes_);
    stream_.free(beside_bytes_, Kind::other);
    beside_bytes_ = 0;
  }

  void discard() {
    Chunk& chunk = any_chunk();
    chunk.dead = true;
    stream_.discard(chunk.id);
  }

  static bool holds(const std::byte* memory, std::uint64_t bytes, std::uint64_t stamp) {
    return std::memcmp(memory, pattern(stamp, bytes).data(), bytes) == 0;
  }

  std::mt19937_64 random_;
  std::atomic<int> wrong_{0};
  const std::shared_ptr<SoftwareCuda> driver_ = std::make_shared<SoftwareCuda>(SoftwareCuda::Options{
      .memory_bytes = 2 * capacity, .granule_bytes = granule, .longest_delay = std::chrono::microseconds(300)});
  const ComputeStream compute_{*driver_};
  TemporaryFolder folder_;
  ThreadEngine engine_;
  CudaDevice device_{driver_, capacity};
  HostArena arena_{granule, TransferService::staging_blocks + 40};
  NvmeStore store_{{folder_.path()}, ExtentFileHeader::kBytes + 80 * granule, granule};
  Budget host_{Tier::host, arena_.capacity_bytes()};
  Budget nvme_{Tier::nvme, 80 * granule};
  AccessStream stream_{{&device_.budget(), &host_, &nvme_}, device_, arena_, &store_, &engine_, {.prefetch_depth = 3}};
  std::vector<Chunk> chunks_;
  std::uint64_t stamps_ = 0;
  std::uint64_t beside_bytes_ = 0;
};

TEST(CudaStream, kernels_find_what_was_written_before_them_however_late_they_run) {
  KernelProgram program(test_seed());
  program.run(1500);
  program.check_all();
}

}  // namespace
}  // namespace terrace
