/// What a folder lies on: its file system, and the drive under it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace terrace {

struct Volume {
  std::string file_system;         ///< "ext4"; empty where the system does not say
  std::uint64_t total_bytes = 0;   ///< of the file system; 0 where it does not say
  std::uint64_t free_bytes = 0;    ///< that this process may take
  std::string drive;               ///< "nvme0n1"; empty where there is none, as under tmpfs, or it is not seen
  std::string model;               ///< of the drive; empty where it is not known
  std::optional<bool> rotational;  ///< whether the drive turns, as the system has it
};

/// Never throws for want of details. `folder` exists; `root` is where /proc and /sys are found.
Volume volume_of(const std::filesystem::path& folder, const std::filesystem::path& root = "/");

}  // namespace terrace
