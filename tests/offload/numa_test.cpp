// Memory is preferred from a node, where the system lets it be; no device is said to be near to a node that is not
// known.

#include "offload/numa.h"

#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/fallback.h"
#include "offload/host_arena.h"
#include "offload/hwloc_handle.h"
#include "offload/topology.h"

namespace terrace {
namespace {

using testing::Contains;
using testing::Field;
using testing::HasSubstr;

TEST(Numa, memory_of_an_arena_comes_from_the_preferred_node_or_a_fallback_says_that_it_may_not) {
  const Topology machine = read_topology();
  if (machine.numa_nodes.empty()) GTEST_SKIP() << "hwloc sees no NUMA node here";
  const unsigned node = machine.numa_nodes.back().number;
  HostArena arena(4096, 16);
  prefer_numa_node(arena.region(), node);

  const HwlocTopology topology = load_hwloc();
  ASSERT_TRUE(topology);
  const HwlocBitmap found(hwloc_bitmap_alloc(), &hwloc_bitmap_free);
  hwloc_membind_policy_t policy = HWLOC_MEMBIND_DEFAULT;
  const std::span<std::byte> region = arena.region();
  if (hwloc_get_area_membind(topology.get(), region.data(), region.size(), found.get(), &policy,
                             HWLOC_MEMBIND_BYNODESET) == 0 &&
      policy == HWLOC_MEMBIND_BIND) {
    EXPECT_EQ(hwloc_bitmap_first(found.get()), static_cast<int>(node));
    EXPECT_EQ(hwloc_bitmap_weight(found.get()), 1);
  } else {
    EXPECT_THAT(noted_fallbacks(),
                Contains(Field(&Fallback::what, HasSubstr("is not bound to the device's NUMA node"))));
  }
  for (std::byte* granule : arena.allocate(16)) std::memset(granule, 1, 4096);
}

TEST(Numa, a_node_that_is_not_there_is_a_fallback_and_the_memory_is_good_all_the_same) {
  HostArena arena(4096, 4);
  prefer_numa_node(arena.region(), 1000);
  EXPECT_THAT(noted_fallbacks(), Contains(Field(&Fallback::what, HasSubstr("is not bound to the device's NUMA node"))));
  for (std::byte* granule : arena.allocate(4)) std::memset(granule, 1, 4096);
}

TEST(Numa, no_node_is_near_to_a_device_that_is_not_there_or_has_no_address) {
  for (const char* const address : {"ffff:ff:1f.7", "", "no address"}) {
    EXPECT_EQ(numa_node_of_pci(address), std::nullopt) << address;
  }
}

TEST(Numa, the_node_of_a_device_is_the_one_that_the_topology_shows) {
  const Topology machine = read_topology();
  for (const Topology::Attached& each : machine.attached) {
    if (each.kind != Topology::Attached::Kind::gpu) continue;
    const std::optional<unsigned> shown = machine.numa_nodes.size() > 1 ? each.numa_node : std::nullopt;
    EXPECT_EQ(numa_node_of_pci(each.name), shown) << each.name;
  }
}

}  // namespace
}  // namespace terrace
