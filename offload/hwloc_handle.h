/// hwloc's view of the machine, owned. For the files that ask hwloc.
#pragma once

#include <hwloc.h>
#include <memory>
#include <optional>

#include "offload/processors.h"

namespace terrace {

using HwlocTopology = std::unique_ptr<hwloc_topology, decltype(&hwloc_topology_destroy)>;
using HwlocBitmap = std::unique_ptr<hwloc_bitmap_s, decltype(&hwloc_bitmap_free)>;

/// With what this process may not use too, and with devices. Null where the machine cannot be seen.
HwlocTopology load_hwloc();
/// Without devices, which take most of the time that loading takes.
HwlocTopology load_hwloc_without_devices();

/// What the process is allowed and has not given up (taskset). Null for want of memory.
HwlocBitmap usable_processors(hwloc_topology_t topology);
/// Those in a set. Throws std::bad_alloc.
Processors processors_in(hwloc_const_cpuset_t set);

/// The NUMA node around a device, where there is one around it and not several.
std::optional<unsigned> numa_node_around(hwloc_topology_t topology, hwloc_obj_t device);

}  // namespace terrace
