/// The policy with passes that it comes to know: what the tests of what it does ahead of need build on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/policy.h"
#include "tests/memory/simulated_driver.h"

namespace terrace {

inline constexpr std::uint64_t MiB = 1024 * 1024;
inline constexpr auto device = Tier::device;
inline constexpr auto host = Tier::host;
inline constexpr auto nvme = Tier::nvme;
inline constexpr auto reading = Access::read;
inline constexpr auto writing = Access::write;

/// Budgets in MiB, chunks of one MiB. A pass is a list of accesses on the device, one after the other.
class PrefetchWorld : public SimulatedDriver {
 public:
  PrefetchWorld(std::uint64_t device_mib, std::uint64_t host_mib, std::uint64_t nvme_mib, std::size_t prefetch_depth,
                std::uint64_t device_chunk_limit = unlimited)
      : SimulatedDriver({device_mib * MiB, host_mib * MiB, nvme_mib * MiB}, device_chunk_limit, prefetch_depth) {}

  ChunkId chunk(Tier home, Kind kind = Kind::parameter) {
    const ChunkId id = add_chunk({.kind = kind,
                                  .index = static_cast<std::uint32_t>(policy().chunk_count()),
                                  .bytes = MiB,
                                  .home = home,
                                  .room_bytes = {MiB, MiB, MiB}});
    use(id, home == nvme ? host : home, writing);
    return id;
  }
  std::vector<ChunkId> chunks(int count, Tier home) {
    std::vector<ChunkId> all;
    for (int i = 0; i < count; ++i) all.push_back(chunk(home));
    return all;
  }
  /// What the device never uses.
  std::vector<ChunkId> states(int count, Tier home) {
    std::vector<ChunkId> all;
    for (int i = 0; i < count; ++i) all.push_back(chunk(home, Kind::momentum));
    return all;
  }

  void pass(const std::vector<ChunkAccess>& accesses) {
    for (const ChunkAccess& access : accesses) use(access.chunk, access.tier, access.mode);
  }
  /// Has the pass recorded, and begins the next.
  void learn(const std::vector<ChunkAccess>& accesses) {
    step_mark();
    begin_pass(1);
    pass(accesses);
    step_mark();
    give_up_rooms();
  }
  /// Reports what is vacated, and leaves transfers where they are.
  void give_up_rooms() {
    while (unreported_vacates() > 0) report_vacate();
  }
  /// Carries out one thing; what is being read on the host when there is nothing else.
  void go_on() { unreported_vacates() > 0 ? report_vacate() : in_flight().empty() ? end_reading() : finish(); }
  /// Carries out one thing after the other until `stop()`; false where nothing is left before.
  template <class Stop>
  bool run_until(Stop&& stop) {
    while (!stop()) {
      if (idle()) return false;
      go_on();
    }
    return true;
  }
  /// Uses the chunk as soon as it is there, and leaves what else is under way where it is.
  void use_once_there(ChunkId chunk, Tier tier, Access mode) {
    Call& call = acquire({{chunk, tier, mode}});
    run_until([&] { return !call.waiting(); });
    release(call);
  }
  bool has_in_flight(ChunkId chunk, Tier from, Tier to) const {
    return std::any_of(in_flight().begin(), in_flight().end(),
                       [&](const Transfer& each) { return each.chunk == chunk && each.from == from && each.to == to; });
  }
  std::uint64_t stalls() { return policy().demand_fetches(); }
};

inline std::vector<ChunkAccess> reads(const std::vector<ChunkId>& chunks) {
  std::vector<ChunkAccess> accesses;
  for (const ChunkId chunk : chunks) accesses.push_back({chunk, device, reading});
  return accesses;
}

}  // namespace terrace
