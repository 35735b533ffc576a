/// The policy in the small: what its tests build on.
#pragma once

#include <cstdint>

#include <gtest/gtest.h>

#include "memory/policy.h"
#include "tests/memory/simulated_driver.h"

namespace terrace {

inline constexpr std::uint64_t MiB = 1024 * 1024;
inline constexpr auto device = Tier::device;
inline constexpr auto host = Tier::host;
inline constexpr auto nvme = Tier::nvme;

inline constexpr ChunkAccess reads(ChunkId chunk, Tier tier = device) { return {chunk, tier, Access::read}; }
inline constexpr ChunkAccess writes(ChunkId chunk, Tier tier = device) { return {chunk, tier, Access::write}; }

/// Budgets in MiB; chunks of one MiB, numbered as they are registered.
class PolicyWorld : public SimulatedDriver {
 public:
  PolicyWorld(std::uint64_t device_mib, std::uint64_t host_mib, std::uint64_t nvme_mib = 0,
              std::uint64_t device_chunks_mib = 1024)
      : SimulatedDriver({device_mib * MiB, host_mib * MiB, nvme_mib * MiB}, device_chunks_mib * MiB) {}

  /// A chunk that was never written.
  ChunkId fresh(Tier home, std::uint64_t mib = 1, Kind kind = Kind::parameter) {
    return add_chunk({.kind = kind,
                      .index = static_cast<std::uint32_t>(policy().chunk_count()),
                      .bytes = mib * MiB,
                      .home = home,
                      .room_bytes = {mib * MiB, mib * MiB, mib * MiB}});
  }

  /// A chunk whose newest bytes are at home, and only there.
  ChunkId written(Tier home, Kind kind = Kind::parameter) {
    const ChunkId chunk = fresh(home, 1, kind);
    write(chunk, home == nvme ? host : home);
    if (home == nvme) push_out(chunk);
    EXPECT_EQ(state(chunk, home), CopyState::valid);
    take_actions();
    return chunk;
  }

  /// Has the copy on the host leave it, by the budget.
  void push_out(ChunkId chunk) {
    const std::uint64_t room = budget(host).free();
    EXPECT_TRUE(budget(host).try_reserve(Kind::other, room));
    const ChunkId other = fresh(nvme);
    Call& call = acquire({reads(other, host)});
    run();
    EXPECT_TRUE(call.granted()) << call.error_text();
    release(call);
    discard(other);
    run();
    budget(host).release(Kind::other, room);
    EXPECT_EQ(state(chunk, host), CopyState::absent);
  }
};

}  // namespace terrace
