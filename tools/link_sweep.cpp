#include "tools/link_sweep.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "offload/emulated_device.h"
#include "offload/transfer_service.h"

namespace terrace {
namespace {

constexpr std::size_t kGranule = std::size_t{1} << 20U;
constexpr int kSamples = 15;
constexpr double kSampleSeconds = 0.15;
constexpr double kLeast = 0.97;
constexpr double kJudgedShare = 0.4;

/// Chunks that cross the link, each way from and into memory of its own.
class Crossing {
 public:
  explicit Crossing(std::uint64_t rate)
      : chunk_bytes_(std::max<std::uint64_t>(
            4 * kGranule,
            static_cast<std::uint64_t>(kSampleSeconds * static_cast<double>(rate) / 4) / kGranule * kGranule)),
        device_(4 * chunk_bytes_, LinkSpeed{.bytes_per_second = rate}),
        arena_(kGranule, static_cast<std::size_t>(2 * chunk_bytes_ / kGranule) + TransferService::staging_blocks),
        service_(device_, arena_, nullptr, nullptr) {
    for (Way& way : ways_) {
      way.places = {.device = device_.map_slot(chunk_bytes_),
                    .host = arena_.allocate(static_cast<std::size_t>(chunk_bytes_ / kGranule)),
                    .nvme = {}};
      std::fill_n(way.places.device, chunk_bytes_, std::byte{1});
      for (std::byte* block : way.places.host) std::fill_n(block, kGranule, std::byte{1});
    }
  }
  ~Crossing() {
    wait();
    for (const Way& way : ways_) device_.unmap_slot(way.places.device, chunk_bytes_);
  }
  Crossing(const Crossing&) = delete;
  Crossing& operator=(const Crossing&) = delete;

  /// Bytes a second of the slower direction among those that carry.
  double rate(bool in, bool out) {
    const std::array<bool, 2> carries{in, out};
    constexpr int chunks = 4;
    const std::int64_t begin_ns = monotonic_ns();
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (std::size_t way = 0; way < 2; ++way) {
        if (carries[way]) start(way);
      }
    }
    wait();
    double slowest = 0;
    for (std::size_t way = 0; way < 2; ++way) {
      if (carries[way]) slowest = std::max(slowest, 1e-9 * static_cast<double>(ways_[way].ended_ns - begin_ns));
    }
    return static_cast<double>(chunks * chunk_bytes_) / slowest;
  }

 private:
  struct Way {
    TransferPlaces places;
    std::int64_t ended_ns = 0;
  };

  void start(std::size_t way) {
    TransferRequest request;
    request.from = way == 0 ? Tier::host : Tier::device;
    request.to = way == 0 ? Tier::device : Tier::host;
    request.bytes = chunk_bytes_;
    request.prepare = [this, way] { return ways_[way].places; };
    request.done = [this, way](const std::exception_ptr& /*never: it copies*/) {
      const std::lock_guard lock(mutex_);
      ways_[way].ended_ns = monotonic_ns();
      if (--under_way_ == 0) ended_.notify_all();
    };
    {
      const std::lock_guard lock(mutex_);
      ++under_way_;
    }
    service_.start(std::move(request));
  }
  void wait() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return under_way_ == 0; });
  }

  const std::uint64_t chunk_bytes_;
  EmulatedDevice device_;
  HostArena arena_;
  std::array<Way, 2> ways_;
  std::mutex mutex_;
  std::condition_variable ended_;
  int under_way_ = 0;
  TransferService service_;  // last: its threads use the rest
};

}  // namespace

std::vector<PacedLink> sweep_link_rates(double copy_rate, const std::function<bool()>& stop) {
  struct Directions {
    const char* name;
    bool in;
    bool out;
  };
  std::vector<PacedLink> links;
  for (const std::uint64_t megabytes : {250, 500, 750, 1000, 1500, 2000}) {
    const std::uint64_t rate = megabytes * 1'000'000;
    Crossing crossing(rate);
    for (const Directions& each : {Directions{"host→device", true, false}, Directions{"device→host", false, true},
                                   Directions{"both at once", true, true}}) {
      std::vector<double> shares;
      for (int sample = 0; sample < kSamples; ++sample) {
        if (stop()) return links;
        shares.push_back(crossing.rate(each.in, each.out) / static_cast<double>(rate));
      }
      PacedLink link{.name = std::string(each.name) + " at " + std::to_string(megabytes) + "MB/s",
                     .configured = static_cast<double>(rate),
                     .achieved_over_configured = median_interval(shares),
                     .judged = static_cast<double>(rate) <= kJudgedShare * copy_rate};
      link.kept = link.achieved_over_configured.median >= kLeast && link.achieved_over_configured.median <= 1;
      links.push_back(std::move(link));
    }
  }
  return links;
}

}  // namespace terrace
