/// Memory near to a device, on machines whose memory is in several NUMA nodes. As hwloc sees them.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

namespace terrace {

/// The node that a PCI device ("0000:1b:00.0") is attached to, as the system numbers it. Nothing where there is only
/// one node, no such device, or nobody knows.
std::optional<unsigned> numa_node_of_pci(const std::string& address);

/// Has the pages of a range of whole pages, as far as none has been touched, come from a node as long as that has free
/// ones, then from others. Where the system refuses, a fallback is noted and pages come from where they are
/// touched.
void prefer_numa_node(std::span<std::byte> memory, unsigned node);

}  // namespace terrace
