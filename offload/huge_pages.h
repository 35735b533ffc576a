/// Whether the emulated device's memory, which is shared memory, may come in pages larger than 4 KiB.
#pragma once

#include <filesystem>
#include <string>

namespace terrace {

/// Why not; empty where it may. `root` is where /sys is found.
std::string why_no_huge_pages(const std::filesystem::path& root = "/");

}  // namespace terrace
