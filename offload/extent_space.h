/// Which extents of a store are free, and which of those the next holder gets.
///
/// Extents are numbered over all files of the store in turn: neighbours in number lie in different files. Giving one
/// back needs no memory. Not thread-safe: guarded by the store's mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "offload/place_set.h"

namespace terrace {

/// Names an extent of one store. Neighbouring ids lie on different paths, and on one path neighbours are adjacent.
enum class ExtentId : std::uint64_t {};

class ExtentSpace {
 public:
  ExtentSpace() = default;  ///< of none
  /// All of them free.
  ExtentSpace(std::uint64_t extents, std::size_t files);

  std::uint64_t free_extents() const noexcept { return free_.count(); }
  /// So many, of which there are as many free: a run of neighbours where there is one, the lowest, so that space set
  /// aside before is used again; and, while there are others, none of a file that is failing.
  /// Nothing changes where there is no memory for the list.
  std::vector<ExtentId> take(std::size_t count);
  void give_back(ExtentId extent) noexcept;

  /// A file is failing from the retirement of one of its extents until something is written to it.
  void set_failing(ExtentId extent, bool failing) { failing_[file_of(static_cast<std::uint64_t>(extent))] = failing; }

 private:
  std::size_t file_of(std::uint64_t id) const { return id % failing_.size(); }
  /// Adds free ones, the lowest first, that are in failing files or are not, until there are `count`.
  void add_lowest(std::vector<ExtentId>& extents, std::size_t count, bool of_failing) const;

  PlaceSet free_;
  std::vector<bool> failing_;  ///< by file
};

}  // namespace terrace
