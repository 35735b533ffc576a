#include "offload/topology.h"

#include <algorithm>
#include <cstdio>

#include "offload/hwloc_handle.h"

namespace terrace {
namespace {

std::size_t count_of(hwloc_topology_t topology, hwloc_obj_type_t type) {
  return static_cast<std::size_t>(std::max(hwloc_get_nbobjs_by_type(topology, type), 0));
}

std::size_t weight_of(hwloc_const_cpuset_t set) {
  return set == nullptr ? 0 : static_cast<std::size_t>(std::max(hwloc_bitmap_weight(set), 0));
}

std::vector<Topology::NumaNode> numa_nodes(hwloc_topology_t topology) {
  std::vector<Topology::NumaNode> nodes;
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    nodes.push_back({node->os_index, node->attr->numanode.local_memory, weight_of(node->cpuset)});
  }
  return nodes;
}

std::vector<Topology::Cache> caches(hwloc_topology_t topology) {
  std::vector<Topology::Cache> found;
  for (const hwloc_obj_type_t level : {HWLOC_OBJ_L2CACHE, HWLOC_OBJ_L3CACHE, HWLOC_OBJ_L4CACHE}) {
    for (hwloc_obj_t cache = nullptr; (cache = hwloc_get_next_obj_by_type(topology, level, cache)) != nullptr;) {
      const unsigned depth = cache->attr->cache.depth;
      const std::uint64_t bytes = cache->attr->cache.size;
      const auto same = std::find_if(found.begin(), found.end(), [&](const Topology::Cache& each) {
        return each.level == depth && each.bytes == bytes;
      });
      if (same == found.end()) {
        found.push_back({depth, bytes, 1});
      } else {
        ++same->count;
      }
    }
  }
  return found;
}

std::string info_of(hwloc_obj_t object, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const char* value = hwloc_obj_get_info_by_name(object, name); value != nullptr) return value;
  }
  return "";
}

bool is_display(hwloc_obj_t pci) { return pci->attr->pcidev.class_id >> 8U == 0x03; }  // PCI's base class

std::string pci_address(hwloc_obj_t pci) {
  const auto& address = pci->attr->pcidev;
  char text[32];
  std::snprintf(text, sizeof text, "%04x:%02x:%02x.%x", static_cast<unsigned>(address.domain),
                static_cast<unsigned>(address.bus), static_cast<unsigned>(address.dev),
                static_cast<unsigned>(address.func));
  return text;
}

/// By name, or by its numbers where nobody knows the name.
std::string model_of(hwloc_obj_t pci) {
  std::string name = info_of(pci, {"PCIDevice"});
  if (!name.empty()) return name;
  char text[32];
  std::snprintf(text, sizeof text, "%04x:%04x", static_cast<unsigned>(pci->attr->pcidev.vendor_id),
                static_cast<unsigned>(pci->attr->pcidev.device_id));
  return text;
}

std::vector<Topology::Attached> attached(hwloc_topology_t topology) {
  std::vector<Topology::Attached> devices;
  for (hwloc_obj_t pci = nullptr; (pci = hwloc_get_next_pcidev(topology, pci)) != nullptr;) {
    if (!is_display(pci)) continue;
    devices.push_back(
        {Topology::Attached::Kind::gpu, pci_address(pci), model_of(pci), numa_node_around(topology, pci)});
  }
  for (hwloc_obj_t device = nullptr; (device = hwloc_get_next_osdev(topology, device)) != nullptr;) {
    if (device->attr->osdev.type != HWLOC_OBJ_OSDEV_BLOCK || device->name == nullptr) continue;
    devices.push_back({Topology::Attached::Kind::drive, device->name, info_of(device, {"Model", "Vendor"}),
                       numa_node_around(topology, device)});
  }
  return devices;
}

}  // namespace

Topology read_topology() {
  Topology result;
  result.library = "hwloc " HWLOC_VERSION;
  const HwlocTopology handle = load_hwloc();
  if (!handle) return result;
  hwloc_topology_t topology = handle.get();
  result.packages = count_of(topology, HWLOC_OBJ_PACKAGE);
  result.cores = count_of(topology, HWLOC_OBJ_CORE);
  result.threads = count_of(topology, HWLOC_OBJ_PU);
  result.usable_threads = weight_of(usable_processors(topology).get());
  result.numa_nodes = numa_nodes(topology);
  result.caches = caches(topology);
  result.attached = attached(topology);
  return result;
}

}  // namespace terrace
