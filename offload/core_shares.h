/// Who owns which hardware threads: the program's computation, the update or the transfers.
///
/// Computation comes first. Its threads get a core each as long as there are cores, and only then the other hardware
/// threads of these; where a NUMA node is near to the device, cores of other nodes, as what updates and transfers work
/// on lies in that one. The update gets all that is left, and transfers share it, as they mostly wait: of it what is
/// near to the device, if that is enough. With less than a hardware thread for each link they would wait for each other
/// and for the update while computation waits for them, and run on any.
///
/// Where nothing is left, updates run while the program waits for them, and everybody on any hardware thread; what is
/// summed up of gradients for their norm, by one thread, is beside computation all the same.
///
/// What computation owns the update leaves to it. Its threads are the program's, and are not bound.
#pragma once

#include <optional>
#include <vector>

#include "offload/processors.h"

struct hwloc_topology;
struct hwloc_bitmap_s;

namespace terrace {

struct CoreShares {
  struct Share {
    Processors processors;             ///< none: any
    std::vector<unsigned> numa_nodes;  ///< that these are near to, on machines with several
    bool operator==(const Share&) const = default;
  };

  Share compute;
  Share update;
  Share transfers;
  bool update_in_background = false;  ///< beside computation, as something is left for it
  int update_threads = 1;             ///< what is left; in place of computation as many as that has
};

/// Of what this process may run on now. Where hwloc does not see that, which is noted as a fallback, all run anywhere.
CoreShares share_cores(int compute_threads, std::optional<unsigned> numa_node_of_device);

/// Of `usable`, on any machine.
CoreShares share_cores(hwloc_topology* topology, const hwloc_bitmap_s* usable, int compute_threads,
                       std::optional<unsigned> numa_node_of_device);

}  // namespace terrace
