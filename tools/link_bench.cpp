#include "tools/link_bench.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "integration/cuda_program.h"
#include "offload/choose_device.h"
#include "offload/copy_rate.h"
#include "offload/cuda_device.h"
#include "offload/emulated_device.h"
#include "offload/host_arena.h"
#include "tools/bench_report.h"
#include "tools/formatted.h"
#include "tools/interrupt.h"
#include "tools/link_sweep.h"
#include "tools/text_table.h"

namespace terrace {
namespace {

/// The format; it goes up when a field changes its meaning.
constexpr int kVersion = 1;
constexpr std::uint64_t kBlockBytes = std::uint64_t{32} << 20U;
constexpr int kRounds = 3;

struct Rate {
  std::string name;
  double bytes_per_second;
};

std::unique_ptr<Device> make_device(const Config::Device& config) {
  const std::uint64_t capacity = 4 * kBlockBytes;
  if (const DeviceChoice choice = choose_device(config, load_cuda_program); choice.driver != nullptr) {
    return std::make_unique<CudaDevice>(choice.driver, capacity);
  }
  return std::make_unique<EmulatedDevice>(capacity);
}

/// A block on each end of each direction.
class Link {
 public:
  Link(Device& device, std::span<std::byte> host) : device_(device), host_(host) {
    std::memset(host_.data(), 1, host_.size());
    for (std::byte*& slot : slots_) slot = device_.map_slot(kBlockBytes);
  }
  ~Link() {
    for (std::byte* slot : slots_) device_.unmap_slot(slot, kBlockBytes);
  }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  /// Bytes a second, those of both directions together.
  double copy(bool in, bool out, std::uint64_t bytes) {
    double best = 0;
    for (int round = 0; round < kRounds; ++round) {
      const Stopwatch watch;
      Fence in_there{};
      Fence out_there{};
      std::uint64_t copied = 0;
      for (std::uint64_t done = 0; done < bytes; done += kBlockBytes) {
        if (in) in_there = device_.copy_in(slots_[0], host_.data(), kBlockBytes);
        if (out) out_there = device_.copy_out(host_.data() + kBlockBytes, slots_[1], kBlockBytes);
        copied += kBlockBytes * ((in ? 1 : 0) + (out ? 1 : 0));
      }
      device_.wait(in_there);
      device_.wait(out_there);
      best = std::max(best, static_cast<double>(copied) / watch.elapsed_seconds());
    }
    return best;
  }

 private:
  Device& device_;
  const std::span<std::byte> host_;
  std::array<std::byte*, 2> slots_{};
};

/// Stops early, with what it has, when `stop` says so.
std::vector<Rate> measure(Device& device, std::uint64_t bytes, const std::function<bool()>& stop) {
  HostArena arena(kBlockBytes, 2);
  Link link(device, arena.region());
  std::vector<Rate> rates;
  const auto add = [&](const char* name, bool in, bool out) {
    if (!stop()) rates.push_back({name, link.copy(in, out, bytes)});
  };
  add("host→device, pageable", true, false);
  device.pin(arena.region());
  add("host→device", true, false);
  add("device→host", false, true);
  add("both at once", true, true);
  device.unpin(arena.region());
  return rates;
}

std::string to_json(const Device& device, const std::vector<Rate>& rates, double copy_rate,
                    const std::vector<PacedLink>& paced) {
  nlohmann::ordered_json common{{"device", device.name()}};
  if (!paced.empty()) common["copy_bytes_per_second"] = copy_rate;
  std::vector<nlohmann::ordered_json> cases;
  for (const Rate& rate : rates) {
    cases.push_back({{"name", rate.name}, {"bytes_per_second", rate.bytes_per_second}});
  }
  for (const PacedLink& link : paced) {
    const Interval& share = link.achieved_over_configured;
    cases.push_back({{"name", link.name},
                     {"configured_bytes_per_second", link.configured},
                     {"bytes_per_second", link.configured * share.median},
                     {"achieved_over_configured", interval_json(share)},
                     {"judged", link.judged},
                     {"kept", link.kept}});
  }
  return bench_json(kVersion, at::get_num_threads(), common, cases);
}

std::string to_text(const Device& device, const std::vector<Rate>& rates, const std::vector<PacedLink>& paced) {
  std::vector<std::vector<std::string>> rows{{std::string(device.name()), "GB/s"}};
  for (const Rate& rate : rates) {
    rows.push_back({rate.name, formatted("%.1f", rate.bytes_per_second * 1e-9)});
  }
  std::string text = format_table(rows);
  if (!paced.empty()) {
    rows = {{"emulated link", "achieved over configured", ""}};
    for (const PacedLink& link : paced) {
      const Interval& share = link.achieved_over_configured;
      rows.push_back({link.name, formatted("%.3f (%.3f to %.3f)", share.median, share.low, share.high),
                      !link.judged ? "not judged"
                      : link.kept  ? "kept"
                                   : "missed"});
    }
    text += '\n';
    text += format_table(rows);
  }
  return text;
}

}  // namespace

bool bench_link(const BenchLinkOptions& options) {
  const Interrupt interrupt;
  const auto stop = [&] { return interrupt.requested(); };
  const std::unique_ptr<Device> device = make_device(options.device);
  const std::vector<Rate> rates = measure(*device, options.bytes, stop);
  const bool emulated = device->is_host_memory();
  const double copy_rate = emulated ? measured_copy_rate() : 0;
  const std::vector<PacedLink> paced = emulated ? sweep_link_rates(copy_rate, stop) : std::vector<PacedLink>{};
  const std::string report =
      options.json ? to_json(*device, rates, copy_rate, paced) + "\n" : to_text(*device, rates, paced);
  std::fputs(report.c_str(), stdout);
  std::fflush(stdout);
  return !stop();
}

}  // namespace terrace
