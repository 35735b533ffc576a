#include "offload/hwloc_handle.h"

namespace terrace {
namespace {

HwlocTopology load(hwloc_type_filter_e devices) {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return {nullptr, &hwloc_topology_destroy};
  HwlocTopology handle(topology, &hwloc_topology_destroy);
  // Those that this process may not use too: they are counted apart.
  hwloc_topology_set_flags(topology, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
  hwloc_topology_set_io_types_filter(topology, devices);
  if (hwloc_topology_load(topology) != 0) handle.reset();
  return handle;
}

}  // namespace

HwlocTopology load_hwloc() { return load(HWLOC_TYPE_FILTER_KEEP_IMPORTANT); }

HwlocTopology load_hwloc_without_devices() { return load(HWLOC_TYPE_FILTER_KEEP_NONE); }

HwlocBitmap usable_processors(hwloc_topology_t topology) {
  HwlocBitmap usable(hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology)), &hwloc_bitmap_free);
  const HwlocBitmap bound(hwloc_bitmap_alloc(), &hwloc_bitmap_free);
  if (!usable || !bound) return {nullptr, &hwloc_bitmap_free};
  if (hwloc_get_cpubind(topology, bound.get(), HWLOC_CPUBIND_PROCESS) == 0) {
    hwloc_bitmap_and(usable.get(), usable.get(), bound.get());
  }
  return usable;
}

Processors processors_in(hwloc_const_cpuset_t set) {
  Processors processors;
  for (int number = -1; (number = hwloc_bitmap_next(set, number)) != -1;) {
    processors.push_back(static_cast<unsigned>(number));
  }
  return processors;
}

std::optional<unsigned> numa_node_around(hwloc_topology_t topology, hwloc_obj_t device) {
  const hwloc_obj_t around = hwloc_get_non_io_ancestor_obj(topology, device);
  if (around == nullptr || around->nodeset == nullptr || hwloc_bitmap_weight(around->nodeset) != 1) return std::nullopt;
  return static_cast<unsigned>(hwloc_bitmap_first(around->nodeset));
}

}  // namespace terrace
