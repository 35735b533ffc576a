/// hwloc's view of the machine, owned. For the files that ask hwloc.
#pragma once

#include <hwloc.h>
#include <memory>
#include <optional>

namespace terrace {

using HwlocTopology = std::unique_ptr<hwloc_topology, decltype(&hwloc_topology_destroy)>;
using HwlocBitmap = std::unique_ptr<hwloc_bitmap_s, decltype(&hwloc_bitmap_free)>;

/// With what this process may not use too, and with devices. Null where the machine cannot be seen.
HwlocTopology load_hwloc();

/// The NUMA node around a device, where there is one around it and not several.
std::optional<unsigned> numa_node_around(hwloc_topology_t topology, hwloc_obj_t device);

}  // namespace terrace
