#include "offload/nvme_paths.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <string>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <system_error>

#include "base/error.h"
#include "base/units.h"
#include "offload/errno_text.h"
#include "offload/extent_file.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

/// A mounted file system, the free space on it, and how many of a store's paths share that.
struct FileSystem {
  fs::path path;  // one of them
  std::uint64_t free_bytes = 0;
  std::uint64_t path_count = 0;
};

/// The folder itself or, where it does not exist yet, the folder in which it would be created.
fs::path nearest_existing(const fs::path& path) {
  std::error_code error;
  fs::path nearest = fs::absolute(path, error);
  while (!nearest.empty() && !fs::exists(nearest, error) && nearest != nearest.parent_path()) {
    nearest = nearest.parent_path();
  }
  return nearest;
}

IoError unusable(const std::string& what, const fs::path& path, int error_number) {
  return IoError("nvme: " + what + " " + path.string() + " failed: " + errno_text(error_number),
                 "set nvme.paths to folders that can be written");
}

std::map<dev_t, FileSystem> file_systems(const std::vector<fs::path>& paths) {
  std::map<dev_t, FileSystem> result;
  for (const fs::path& path : paths) {
    const fs::path existing = nearest_existing(path);
    struct stat status {};
    struct statvfs space {};
    if (::stat(existing.c_str(), &status) != 0 || ::statvfs(existing.c_str(), &space) != 0) {
      throw unusable("reading the free space of", path, errno);
    }
    FileSystem& file_system = result[status.st_dev];
    if (file_system.path_count == 0) file_system.path = path;
    file_system.free_bytes = static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize;
    ++file_system.path_count;
  }
  return result;
}

/// As free: they are removed before the space is needed.
void count_leftovers(const std::vector<fs::path>& paths, std::map<dev_t, FileSystem>& systems) {
  std::set<fs::path> folders;
  Patience patience;
  for (const fs::path& path : paths) {
    std::error_code error;
    const fs::path folder = fs::canonical(path, error);
    struct stat status {};
    if (error || !folders.insert(folder).second || ::stat(folder.c_str(), &status) != 0) continue;
    systems[status.st_dev].free_bytes += dead_extent_file_bytes(folder, patience);
  }
}

}  // namespace

void make_nvme_folder(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) throw unusable("creation of folder", path, error.value());
  if (!fs::is_directory(path, error)) throw unusable("opening of folder", path, ENOTDIR);
}

std::uint64_t extents_a_path(std::size_t path_count, std::uint64_t capacity_bytes, std::size_t extent_bytes) {
  const std::uint64_t share = capacity_bytes / path_count;
  const std::uint64_t smallest_share = extent_file_bytes(extent_bytes, 1);
  if (share < smallest_share) {
    throw OutOfMemory("nvme: nvme.memory (" + format_bytes(capacity_bytes) + ") does not hold one extent of " +
                          format_bytes(extent_bytes) + " on each of " + std::to_string(path_count) + " paths",
                      "raise nvme.memory to at least " + format_bytes_exactly(smallest_share * path_count));
  }
  std::uint64_t extents = (share - ExtentFileHeader::kBytes) / (extent_bytes + ExtentRecord::kBytes);
  while (extent_file_bytes(extent_bytes, extents + 1) <= share) ++extents;
  while (extent_file_bytes(extent_bytes, extents) > share) --extents;
  return extents;
}

void require_nvme_room(const std::vector<fs::path>& paths, std::uint64_t capacity_bytes, std::size_t extent_bytes,
                       Leftovers leftovers) {
  std::map<dev_t, FileSystem> systems = file_systems(paths);
  if (leftovers == Leftovers::still_there) count_leftovers(paths, systems);
  for (const auto& [device, file_system] : systems) {
    // Headers and records have their space already, so that it is neither free any more nor needed again.
    const std::uint64_t need =
        extents_a_path(paths.size(), capacity_bytes, extent_bytes) * extent_bytes * file_system.path_count;
    if (need <= file_system.free_bytes) continue;
    throw IoError("nvme: nvme.memory (" + format_bytes(capacity_bytes) + ") needs " + format_bytes(need) +
                      " on the file system of " + file_system.path.string() + ", where " +
                      format_bytes(file_system.free_bytes) + " are free",
                  "lower nvme.memory or free space");
  }
}

std::uint64_t default_nvme_capacity(const std::vector<fs::path>& paths) {
  std::map<dev_t, FileSystem> systems = file_systems(paths);
  count_leftovers(paths, systems);
  if (systems.empty()) return 0;
  std::uint64_t share = ~std::uint64_t{0};
  for (const auto& [device, file_system] : systems) {
    if (file_system.free_bytes == 0) {
      throw IoError("nvme: the file system of " + file_system.path.string() + " has 0B free",
                    "set nvme.paths to folders that can be written, on drives with free space");
    }
    share = std::min(share, file_system.free_bytes / 10 * 9 / file_system.path_count);
  }
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    share = std::min<std::uint64_t>(share, limit.rlim_cur);
  }
  return share * paths.size();
}

}  // namespace terrace
