#include "offload/numa.h"

#include <cerrno>

#include "base/fallback.h"
#include "offload/errno_text.h"
#include "offload/hwloc_handle.h"

namespace terrace {

std::optional<unsigned> numa_node_of_pci(const std::string& address) {
  const HwlocTopology topology = load_hwloc();
  if (!topology || hwloc_get_nbobjs_by_type(topology.get(), HWLOC_OBJ_NUMANODE) < 2) {
    return std::nullopt;
  }
  const hwloc_obj_t device = hwloc_get_pcidev_by_busidstring(topology.get(), address.c_str());
  return device != nullptr ? numa_node_around(topology.get(), device) : std::nullopt;
}

void prefer_numa_node(std::span<std::byte> memory, unsigned node) {
  const HwlocTopology topology = load_hwloc();
  const HwlocBitmap nodes(hwloc_bitmap_alloc(), &hwloc_bitmap_free);
  if (!topology || !nodes) {
    errno = ENOSYS;
  } else if (hwloc_bitmap_set(nodes.get(), node) == 0 &&
             // Not strict: a preference.
             hwloc_set_area_membind(topology.get(), memory.data(), memory.size(), nodes.get(), HWLOC_MEMBIND_BIND,
                                    HWLOC_MEMBIND_BYNODESET) == 0) {
    return;
  }
  note_fallback("host: memory is not bound to the device's NUMA node, so that copies may be slower",
                "binding it to node " + std::to_string(node) + " failed: " + errno_text(errno));
}

}  // namespace terrace
