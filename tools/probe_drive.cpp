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
#include "offload/volume.h"
#include "tools/paired.h"
#include "tools/random_bytes.h"

namespace terrace {
namespace {

using Direction = IoOperation::Direction;

constexpr std::int64_t kLasts_ns = 100'000'000;  // each time
constexpr int kRounds = 3;
constexpr std::size_t kMiB = std::size_t{1} << 20U;
constexpr std::uint64_t kLeastFile = 2 * kMiB;
constexpr std::uint64_t kLargestFile = 512 * kMiB;
constexpr std::size_t kUnit = kMiB / 4;  ///< what blocks and the file consist of
constexpr std::size_t kUsualInFlight = 8 * kMiB;
constexpr std::size_t kMostInFlight = 32 * kMiB;

std::uint64_t file_bytes(const std::filesystem::path& folder, std::uint64_t most_bytes) {
  const std::uint64_t free_bytes = volume_of(folder).free_bytes;
  const std::uint64_t bytes = std::min({most_bytes, free_bytes / 2, kLargestFile});
  if (bytes >= kLeastFile) return bytes / kUnit * kUnit;
  throw IoError("probe: a file of " + format_bytes(kLeastFile) + " does not fit into " + folder.string() + ": " +
                    format_bytes(free_bytes) + " are free, of which half are used, and the tier's share is " +
                    format_bytes(most_bytes),
                "free space, raise nvme.memory, or probe without this path");
}

/// A way to use a drive: so many blocks in flight.
struct Way {
  std::size_t block_bytes = 0;
  std::size_t depth = 0;
  std::vector<double> read;  ///< bytes a second, each time
  std::vector<double> write;

  /// Of as many bytes read as written.
  double rate() const { return 2 / (1 / median_of(read) + 1 / median_of(write)); }
};

/// A file that is gone over block by block, from the front, and again where its end comes first.
class Course {
 public:
  Course(const std::filesystem::path& folder, std::uint64_t bytes, IoEngine& engine, const std::function<bool()>& stop)
      : file_(folder, kUnit, bytes / kUnit),
        bytes_(bytes),
        engine_(engine),
        stop_(stop),
        memory_(kUnit, most_in_flight() / kUnit) {
    file_.reserve_space(0, bytes / kUnit);
    fill_with_random_bytes(memory_.region());
    const Way whole{.block_bytes = kUnit, .depth = most_in_flight() / kUnit, .read = {}, .write = {}};
    move(Direction::write, whole, bytes_ / kUnit);  // so that what is measured changes what is there
  }

  bool direct() const { return file_.direct(); }
  /// No block is to be on its way twice.
  std::size_t most_in_flight() const {
    return static_cast<std::size_t>(std::min<std::uint64_t>(bytes_ / 2, kMostInFlight));
  }

  /// Each way in turn, a few times.
  void measure(std::vector<Way>& ways) {
    for (int round = 0; round == 0 || (round < kRounds && !stop_()); ++round) {
      for (Way& way : ways) {
        way.write.push_back(move(Direction::write, way));
        way.read.push_back(move(Direction::read, way));
      }
    }
  }

 private:
  /// So many blocks, or as many as the time allows, and never fewer than are in flight at once. Returns bytes a second.
  double move(Direction direction, const Way& way, std::uint64_t count = 0) {
    const std::span<std::byte> memory = memory_.region();
    const std::unique_ptr<IoQueue> queue = engine_.open_queue(way.depth, {&memory, 1});
    const std::uint64_t blocks = bytes_ / way.block_bytes;
    const Stopwatch watch;
    std::uint64_t started = 0;
    const auto start = [&](std::byte* block) {
      const std::uint64_t unit = started++ % blocks * (way.block_bytes / kUnit);
      queue->submit({direction, &file_.file(), file_.offset_of(unit), block, way.block_bytes, block});
    };
    for (std::size_t i = 0; i < way.depth; ++i) start(memory.data() + i * way.block_bytes);
    std::vector<IoCompletion> done;
    while (queue->in_flight() > 0) {
      done.clear();
      queue->wait(done);
      for (const IoCompletion& completion : done) {
        if (completion.error) std::rethrow_exception(completion.error);
        const bool goes_on = count > 0 ? started < count : watch.elapsed_ns() < kLasts_ns;
        const bool is_new = file_.direct() || started < blocks;  // a page cache would give the same block back
        if (goes_on && is_new && !stop_()) start(static_cast<std::byte*>(completion.owner));
      }
    }
    if (direction == Direction::write) leave_page_cache();
    return static_cast<double>(started * way.block_bytes) / watch.elapsed_seconds();
  }

  /// What went through the page cache counts when it is on the drive, and is read from there.
  void leave_page_cache() const {
    if (file_.direct()) return;
    ::fdatasync(file_.file().descriptor);
    ::posix_fadvise(file_.file().descriptor, 0, 0, POSIX_FADV_DONTNEED);
  }

  ExtentFile file_;
  const std::uint64_t bytes_;
  IoEngine& engine_;
  const std::function<bool()>& stop_;
  HostArena memory_;
};

/// Of those that are hardly slower than the fastest, the first.
const Way& first_of_the_fast(const std::vector<Way>& ways) {
  const auto slower = [](const Way& a, const Way& b) { return a.rate() < b.rate(); };
  const double fast = 0.95 * std::max_element(ways.begin(), ways.end(), slower)->rate();
  return *std::find_if(ways.begin(), ways.end(), [&](const Way& way) { return way.rate() >= fast; });
}

}  // namespace

DriveRates probe_drive(const std::filesystem::path& folder, IoEngine& engine, std::uint64_t most_bytes,
                       const std::function<bool()>& stop) {
  Course course(folder, file_bytes(folder, most_bytes), engine, stop);
  std::vector<Way> sizes;
  const std::size_t usual_bytes = std::min(kUsualInFlight, course.most_in_flight());
  for (std::size_t block = kUnit; block <= std::min(HostArena::most_granule_bytes, usual_bytes); block *= 4) {
    sizes.push_back({.block_bytes = block, .depth = usual_bytes / block, .read = {}, .write = {}});
  }
  course.measure(sizes);
  const std::size_t block_bytes = first_of_the_fast(sizes).block_bytes;
  std::vector<Way> depths;
  for (std::size_t depth = 1; depth * block_bytes <= course.most_in_flight(); depth *= 2) {
    depths.push_back({.block_bytes = block_bytes, .depth = depth, .read = {}, .write = {}});
  }
  course.measure(depths);
  const Way& best = first_of_the_fast(depths);
  return {.read = median_of(best.read),
          .write = median_of(best.write),
          .engine = std::string(engine.name()),
          .block_bytes = best.block_bytes,
          .depth = best.depth,
          .direct = course.direct(),
          .measured_at = time_now()};
}

}  // namespace terrace
