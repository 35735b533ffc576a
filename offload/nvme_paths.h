/// The folders of an NVMe tier, and what they have room for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

namespace terrace {

/// 90% of the free space that an even split over the paths can use, counting what dead processes left as free, and no
/// more than files may have of this process.
/// Changes nothing on disk; the paths need not exist yet. Throws IoError, also where there is no free space at all.
std::uint64_t default_nvme_capacity(const std::vector<std::filesystem::path>& paths);

/// How many extents each path's even share of `capacity_bytes` holds beside the file's header. Throws OutOfMemory if
/// that is none.
std::uint64_t extents_a_path(std::size_t path_count, std::uint64_t capacity_bytes, std::size_t extent_bytes);

/// With the folders it is in. Throws IoError if there can be no folder of that path.
void make_nvme_folder(const std::filesystem::path& path);

/// What dead processes left in the folders of a tier.
enum class Leftovers { removed, still_there };

/// Throws IoError if `capacity_bytes`, split evenly over the paths, exceeds the free space, of which leftovers that are
/// still there are a part. To be asked when each path has its extent file: a file system that cannot be written may
/// report no free space, and headers are counted as written.
void require_nvme_room(const std::vector<std::filesystem::path>& paths, std::uint64_t capacity_bytes,
                       std::size_t extent_bytes, Leftovers leftovers);

}  // namespace terrace
