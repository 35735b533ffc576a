/// How fast the machine's memory is.
#pragma once

#include <functional>

#include "integration/rates.h"
#include "offload/topology.h"

namespace terrace {

/// Takes about two seconds, on as many threads as this process may use, over memory beyond their caches. Ends soon,
/// with figures that mean nothing, once `stop` says so. `stop` is called by several
/// threads. Throws std::bad_alloc where that much memory is not to be had.
MemoryRates probe_memory(const Topology& topology, const std::function<bool()>& stop);

}  // namespace terrace
