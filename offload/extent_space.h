/// Which extents of a store are free, and which of those the next holder gets.
///
/// Extents are numbered over all files of the store in turn: neighbours in number lie in different files. Not
/// thread-safe: guarded by the store's mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace terrace {

/// Names an extent of one store. Neighbouring ids lie on different paths, and on one path neighbours are adjacent.
enum class ExtentId : std::uint64_t {};

class ExtentSpace {
 public:
  ExtentSpace() = default;  ///< of none
  /// All of them free.
  ExtentSpace(std::uint64_t extents, std::size_t files);

  std::uint64_t free_extents() const noexcept { return free_extents_; }
  /// So many, of which there are as many free: a run of neighbours where there is one, the lowest, so that space set
  /// aside before is used again; and, while there are others, none of a file that is failing.
  std::vector<ExtentId> take(std::size_t count);
  void give_back(ExtentId extent);

  /// A file is failing from the retirement of one of its extents until something is written to it.
  void set_failing(ExtentId extent, bool failing) { failing_[file_of(extent)] = failing; }

 private:
  std::size_t file_of(ExtentId extent) const { return static_cast<std::uint64_t>(extent) % failing_.size(); }
  std::vector<ExtentId> take_beside_failing_files(std::size_t count);
  void take_one(std::uint64_t id);

  std::map<std::uint64_t, std::uint64_t> runs_;  ///< first id of a run of free extents -> how many
  std::uint64_t free_extents_ = 0;
  std::vector<bool> failing_;  ///< by file
};

}  // namespace terrace
