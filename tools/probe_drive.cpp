#include "tools/probe_drive.h"

#include <algorithm>
#include <exception>
#include <fcntl.h>
#include <memory>
#include <span>
#include <string>
#include <unistd.h>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/units.h"
#include "offload/extent_file.h"
#include "offload/host_arena.h"
#include "offload/nvme_worker.h"
#include "offload/volume.h"
#include "tools/random_bytes.h"

namespace terrace {
namespace {

using Direction = IoOperation::Direction;

constexpr std::int64_t kLasts_ns = 2'000'000'000;
constexpr std::uint64_t kLargestFile = std::uint64_t{4} << 30U;

std::uint64_t block_count(const std::filesystem::path& folder, std::size_t block_bytes, std::uint64_t most_bytes) {
  const std::uint64_t free_bytes = volume_of(folder).free_bytes;
  const std::uint64_t blocks = std::min({most_bytes, free_bytes / 2, kLargestFile}) / block_bytes;
  const std::size_t depth = NvmeWorker::default_depth(block_bytes);
  if (blocks >= depth) return blocks;
  throw IoError("probe: " + std::to_string(depth) + " blocks of " + format_bytes(block_bytes) + " do not fit into " +
                    folder.string() + ": " + format_bytes(free_bytes) + " are free, of which half are used",
                "free space, raise nvme.memory, or probe without this path");
}

/// Blocks of memory with random bytes, which a drive cannot make smaller.
class RandomBlocks {
 public:
  RandomBlocks(std::size_t block_bytes, std::size_t count)
      : arena_(block_bytes, count), blocks_(arena_.allocate(count)) {
    fill_with_random_bytes(arena_.region());
  }

  std::byte* operator[](std::size_t index) const { return blocks_[index]; }

  std::vector<std::span<std::byte>> regions() const {
    std::vector<std::span<std::byte>> regions;
    for (std::byte* block : blocks_) regions.emplace_back(block, arena_.granule_bytes());
    return regions;
  }

 private:
  HostArena arena_;
  std::vector<std::byte*> blocks_;
};

/// A file that is gone over block by block, from the front, and again where its end comes first.
class Course {
 public:
  Course(const ExtentFile& file, IoEngine& engine, std::size_t block_bytes, const std::function<bool()>& stop)
      : file_(file),
        block_bytes_(block_bytes),
        stop_(stop),
        memory_(block_bytes, NvmeWorker::default_depth(block_bytes)),
        queue_(engine.open_queue(NvmeWorker::default_depth(block_bytes), memory_.regions())) {}

  /// Moves blocks for as long as a measurement lasts; returns how many.
  std::uint64_t run(Direction direction, std::uint64_t blocks) {
    const Stopwatch watch;
    std::uint64_t started = 0;
    const auto start = [&](std::size_t slot) {
      queue_->submit(
          {direction, &file_.file(), file_.offset_of(started++ % blocks), memory_[slot], block_bytes_, memory_[slot]});
    };
    std::uint64_t moved = 0;
    std::vector<IoCompletion> done;
    for (std::size_t slot = 0; slot < queue_->depth(); ++slot) start(slot);
    while (queue_->in_flight() > 0) {
      done.clear();
      queue_->wait(done);
      for (const IoCompletion& completion : done) {
        if (completion.error) std::rethrow_exception(completion.error);
        ++moved;
        if (watch.elapsed_ns() < kLasts_ns && !stop_()) start(slot_of(completion));
      }
    }
    return moved;
  }

  std::size_t depth() const { return queue_->depth(); }

 private:
  std::size_t slot_of(const IoCompletion& completion) const {
    std::size_t slot = 0;
    while (memory_[slot] != completion.owner) ++slot;
    return slot;
  }

  const ExtentFile& file_;
  const std::size_t block_bytes_;
  const std::function<bool()>& stop_;
  const RandomBlocks memory_;
  const std::unique_ptr<IoQueue> queue_;  // after the memory, which it may still use when it goes
};

/// What went through the page cache counts when it is on the drive, and is read from there.
void leave_page_cache(const ExtentFile& file) {
  if (file.direct()) return;
  ::fdatasync(file.file().descriptor);
  ::posix_fadvise(file.file().descriptor, 0, 0, POSIX_FADV_DONTNEED);
}

}  // namespace

DriveRates probe_drive(const std::filesystem::path& folder, IoEngine& engine, std::size_t block_bytes,
                       std::uint64_t most_bytes, const std::function<bool()>& stop) {
  const std::uint64_t blocks = block_count(folder, block_bytes, most_bytes);
  ExtentFile file(folder, block_bytes, blocks);
  file.reserve_space(0, blocks);
  Course course(file, engine, block_bytes, stop);
  DriveRates rates;
  Stopwatch watch;
  const std::uint64_t written = course.run(Direction::write, blocks);
  leave_page_cache(file);
  rates.write = static_cast<double>(written * block_bytes) / watch.elapsed_seconds();
  watch.restart();
  const std::uint64_t read = course.run(Direction::read, std::min(written, blocks));
  rates.read = static_cast<double>(read * block_bytes) / watch.elapsed_seconds();
  rates.engine = engine.name();
  rates.block_bytes = block_bytes;
  rates.depth = course.depth();
  rates.direct = file.direct();
  rates.measured_at = time_now();
  return rates;
}

}  // namespace terrace
