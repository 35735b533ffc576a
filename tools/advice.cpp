#include "tools/advice.h"

#include <algorithm>
#include <cstdint>

#include "base/units.h"
#include "tools/account.h"

namespace terrace {
namespace {

constexpr double kFull = 0.95;              // of a budget
constexpr std::uint64_t kWorthRaising = 8;  // by so many times less than the budget is not worth the words
constexpr std::uint64_t kLargePart = 8;     // of a budget, by so many times less

/// Looks at one run. Each function gives the advice on one cause, most helpful first.
class Adviser {
 public:
  explicit Adviser(const RunFacts& facts) : facts_(facts), config_(facts.config), usage_(facts.usage) {}

  std::string on_bytes_from_nvme() const {
    if (config_.io.prefetch == 0) return more_prefetch();
    if (can_raise(Tier::host)) return raise(Tier::host) + " so that less rests on NVMe, or use a faster drive";
    if (!is_full(Tier::host) && is_placed_on_nvme()) {
      return "lower the shares of nvme in [placement]: the host has room";
    }
    return "use a faster drive, or several: nvme.paths stripes over its folders";
  }

  std::string on_bytes_to_the_device() const {
    if (config_.io.prefetch == 0) return more_prefetch();
    return on_the_link("so that more stays there");
  }

  std::string on_bytes_from_the_device() const { return on_the_link("so that less has to leave it"); }

  std::string on_room_on_the_device() const {
    if (chunks_are_capped()) return raise_chunks();
    const std::string& activations = config_.placement.activations;
    const bool keeps = activations == "keep" && tensors_are_large();
    const std::string recompute = "set placement.activations = \"recompute\"";
    if (can_raise(Tier::device)) return raise(Tier::device) + (keeps ? ", or " + recompute : "");
    if (keeps) return recompute;
    if (config_.train.micro_batch > 1 && tensors_are_large()) {
      return "lower train.micro_batch (now " + std::to_string(config_.train.micro_batch) +
             ") and raise train.accumulate as much";
    }
    return "";
  }

  std::string on_room_on_the_host() const {
    if (can_raise(Tier::host)) return raise(Tier::host);
    return usage_.capacity(Tier::nvme) > 0 ? "use a faster drive: what leaves the host is written to it" : "";
  }

  std::string on_room_on_nvme() const { return can_raise(Tier::nvme) ? raise(Tier::nvme) : ""; }

  std::string on_the_update() const {
    if (a_core_would_help()) {
      return "leave the update a core: OMP_NUM_THREADS=" + std::to_string(facts_.cores - 1) + " (now " +
             std::to_string(facts_.threads) + " threads on " + std::to_string(facts_.cores) + " cores)";
    }
    if (usage_.peak(Tier::nvme, Kind::momentum) > 0 && can_raise(Tier::host)) {
      return raise(Tier::host) + " so that less of the optimizer's state rests on NVMe";
    }
    return "";
  }

 private:
  static bool is_at(std::uint64_t peak, std::uint64_t cap) {
    return static_cast<double>(peak) >= kFull * static_cast<double>(cap);
  }
  bool is_full(Tier tier) const { return is_at(usage_.peak(tier), usage_.capacity(tier)); }
  bool can_raise(Tier tier) const {
    return usage_.capacity(tier) > 0 && is_full(tier) &&
           facts_.spare_bytes[index_of(tier)] >= usage_.capacity(tier) / kWorthRaising;
  }
  std::string raise(Tier tier) const {
    return "raise " + std::string(name_of(tier)) + ".memory (now " + format_bytes(usage_.capacity(tier)) + ")";
  }

  /// Chunks take what they may of the device, and the device has room beside.
  bool chunks_are_capped() const {
    return config_.device.chunks && is_at(usage_.chunk_peak(Tier::device), *config_.device.chunks) &&
           !is_full(Tier::device);
  }
  std::string raise_chunks() const {
    return "raise device.chunks (now " + format_bytes(*config_.device.chunks) + "): device.memory has room";
  }
  static std::string more_prefetch() { return "raise io.prefetch (now 0) so that bytes come ahead of need"; }

  /// The program's own tensors, activations for the most part.
  bool tensors_are_large() const {
    const std::uint64_t bytes = usage_.peak(Tier::device, Kind::activation) + usage_.peak(Tier::device, Kind::other);
    return bytes >= usage_.capacity(Tier::device) / kLargePart;
  }

  /// Updates that the program's thread makes itself take more of the time than a core is of all.
  bool a_core_would_help() const {
    return facts_.threads >= facts_.cores && facts_.update_seconds * facts_.cores > facts_.seconds;
  }

  bool is_placed_on_nvme() const {
    const auto& placement = config_.placement;
    const auto has_share = [](const std::optional<Config::Shares>& shares) { return shares && shares->nvme > 0; };
    return has_share(placement.parameters) || has_share(placement.gradients) || has_share(placement.optimizer);
  }

  std::string on_the_link(const char* purpose) const {
    if (chunks_are_capped()) return raise_chunks();
    if (can_raise(Tier::device)) return raise(Tier::device) + " " + purpose;
    if (config_.device.link) {
      return "raise device.link (now " + format_bytes(*config_.device.link) + "/s), which emulates a link of that rate";
    }
    return "";
  }

  const RunFacts& facts_;
  const Config& config_;
  const MemoryUsage& usage_;
};

}  // namespace

std::string advice_on(StallCause cause, const RunFacts& facts) {
  const Adviser adviser(facts);
  switch (cause) {
    case StallCause::nvme_to_host:
      return adviser.on_bytes_from_nvme();
    case StallCause::host_to_device:
      return adviser.on_bytes_to_the_device();
    case StallCause::device_to_host:
      return adviser.on_bytes_from_the_device();
    case StallCause::device_room:
      return adviser.on_room_on_the_device();
    case StallCause::host_room:
      return adviser.on_room_on_the_host();
    case StallCause::nvme_room:
      return adviser.on_room_on_nvme();
    case StallCause::update:
      break;
  }
  return adviser.on_the_update();
}

}  // namespace terrace
