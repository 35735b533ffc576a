/// What the machine is made of, and what of it this process may use, as hwloc sees it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace terrace {

struct Topology {
  struct NumaNode {
    unsigned number = 0;  ///< as the system numbers it
    std::uint64_t memory_bytes = 0;
    std::size_t threads = 0;  ///< hardware threads that are near to it
    bool operator==(const NumaNode&) const = default;
  };

  /// Those of one level and size.
  struct Cache {
    unsigned level = 0;
    std::uint64_t bytes = 0;  ///< of each
    std::size_t count = 0;
    bool operator==(const Cache&) const = default;
  };

  struct Attached {
    enum class Kind : std::uint8_t { gpu, drive };
    Kind kind = Kind::drive;
    std::string name;                   ///< "nvme0n1"; of a GPU without a driver, its PCI address
    std::string model;                  ///< empty where it is not known
    std::optional<unsigned> numa_node;  ///< that it is attached to, where that is one
    bool operator==(const Attached&) const = default;
  };

  std::string library;  ///< that saw it: "hwloc 2.9.0"
  std::size_t packages = 0;
  std::size_t cores = 0;
  std::size_t threads = 0;         ///< hardware threads
  std::size_t usable_threads = 0;  ///< of these, what this process may run on
  std::vector<NumaNode> numa_nodes;
  std::vector<Cache> caches;  ///< of data, level 2 and up
  std::vector<Attached> attached;
};

/// Never throws for want of details: what hwloc cannot tell is left out, and counts are 0.
Topology read_topology();

}  // namespace terrace
