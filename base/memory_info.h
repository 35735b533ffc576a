/// How much memory this process may still take, and has taken.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace terrace {

/// The least of what the machine has available and of what each control group (version 1 or 2) that holds this process
/// leaves: its limit less its usage, where page cache that the kernel would give up does not count as used.
///
/// A snapshot: other processes change it. `root` is where /proc and /sys are found. Throws IoError if the machine does
/// not say what is available; a control group that cannot be read sets no limit.
std::uint64_t available_memory_bytes(const std::filesystem::path& root = "/");

/// The least limit of those control groups, such as a container's; nothing where none sets one.
std::optional<std::uint64_t> memory_limit_bytes(const std::filesystem::path& root = "/");

/// The most memory that this process has held at one time: its own and the files that it has mapped, and not the page
/// cache. Nothing where the machine does not say.
std::optional<std::uint64_t> peak_resident_bytes(const std::filesystem::path& root = "/");

}  // namespace terrace
