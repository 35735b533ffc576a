#include "offload/hwloc_handle.h"

namespace terrace {

HwlocTopology load_hwloc() {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return {nullptr, &hwloc_topology_destroy};
  HwlocTopology handle(topology, &hwloc_topology_destroy);
  // Those that this process may not use too: they are counted apart.
  hwloc_topology_set_flags(topology, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
  hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  if (hwloc_topology_load(topology) != 0) handle.reset();
  return handle;
}

std::optional<unsigned> numa_node_around(hwloc_topology_t topology, hwloc_obj_t device) {
  const hwloc_obj_t around = hwloc_get_non_io_ancestor_obj(topology, device);
  if (around == nullptr || around->nodeset == nullptr || hwloc_bitmap_weight(around->nodeset) != 1) return std::nullopt;
  return static_cast<unsigned>(hwloc_bitmap_first(around->nodeset));
}

}  // namespace terrace
