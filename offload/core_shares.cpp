#include "offload/core_shares.h"

#include <algorithm>
#include <thread>
#include <tuple>

#include "base/fallback.h"
#include "offload/hwloc_handle.h"
#include "offload/tier.h"

namespace terrace {
namespace {

struct Candidate {
  unsigned number = 0;
  bool is_near = false;          ///< to the device
  std::size_t rank_in_core = 0;  ///< among what is usable of its core
};

/// As computation takes them.
std::vector<Candidate> candidates(hwloc_topology_t topology, hwloc_const_cpuset_t usable,
                                  std::optional<unsigned> numa_node) {
  const hwloc_obj_t node = numa_node ? hwloc_get_numanode_obj_by_os_index(topology, *numa_node) : nullptr;
  std::vector<Candidate> all;
  hwloc_obj_t core_before = nullptr;
  for (hwloc_obj_t each = nullptr;
       (each = hwloc_get_next_obj_inside_cpuset_by_type(topology, usable, HWLOC_OBJ_PU, each)) != nullptr;) {
    const hwloc_obj_t core = hwloc_get_ancestor_obj_by_type(topology, HWLOC_OBJ_CORE, each);
    const bool same_core = core != nullptr && core == core_before;
    core_before = core;
    all.push_back({.number = each->os_index,
                   .is_near = node != nullptr && hwloc_bitmap_isset(node->cpuset, each->os_index) != 0,
                   .rank_in_core = same_core ? all.back().rank_in_core + 1 : 0});
  }
  std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
    return std::tie(a.rank_in_core, a.is_near) < std::tie(b.rank_in_core, b.is_near);
  });
  return all;
}

std::vector<unsigned> numa_nodes_of(hwloc_topology_t topology, const Processors& processors) {
  std::vector<unsigned> nodes;
  if (hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE) < 2) return nodes;
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    const bool is_near = std::any_of(processors.begin(), processors.end(),
                                     [&](unsigned number) { return hwloc_bitmap_isset(node->cpuset, number) != 0; });
    if (is_near) nodes.push_back(node->os_index);
  }
  return nodes;
}

CoreShares::Share share_of(hwloc_topology_t topology, Processors processors) {
  std::sort(processors.begin(), processors.end());
  std::vector<unsigned> nodes = numa_nodes_of(topology, processors);
  return {std::move(processors), std::move(nodes)};
}

/// Without owners.
CoreShares counted(int compute_threads, int usable) {
  CoreShares shares;
  shares.update_in_background = compute_threads < usable;
  shares.update_threads = std::max(shares.update_in_background ? usable - compute_threads : compute_threads, 1);
  return shares;
}

}  // namespace

CoreShares share_cores(hwloc_topology* topology, const hwloc_bitmap_s* usable, int compute_threads,
                       std::optional<unsigned> numa_node_of_device) {
  compute_threads = std::max(compute_threads, 1);
  const std::vector<Candidate> all = candidates(topology, usable, numa_node_of_device);
  CoreShares shares = counted(compute_threads, static_cast<int>(all.size()));
  if (!shares.update_in_background) return shares;
  Processors compute;
  Processors update;
  Processors near_update;
  for (const Candidate& each : all) {
    if (compute.size() < static_cast<std::size_t>(compute_threads)) {
      compute.push_back(each.number);
      continue;
    }
    update.push_back(each.number);
    if (each.is_near) near_update.push_back(each.number);
  }
  if (near_update.size() >= link_count) {
    shares.transfers = share_of(topology, std::move(near_update));
  } else if (update.size() >= link_count) {
    shares.transfers = share_of(topology, update);
  }
  shares.compute = share_of(topology, std::move(compute));
  shares.update = share_of(topology, std::move(update));
  return shares;
}

CoreShares share_cores(int compute_threads, std::optional<unsigned> numa_node_of_device) {
  const HwlocTopology topology = load_hwloc_without_devices();
  const HwlocBitmap usable = topology ? usable_processors(topology.get()) : HwlocBitmap(nullptr, &hwloc_bitmap_free);
  if (usable && !hwloc_bitmap_iszero(usable.get())) {
    return share_cores(topology.get(), usable.get(), compute_threads, numa_node_of_device);
  }
  note_fallback("threads: nobody has cores of his own", "hwloc does not see which ones this process may run on");
  return counted(std::max(compute_threads, 1), static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace terrace
