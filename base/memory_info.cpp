#include "base/memory_info.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "base/error.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

/// Where a version of control groups keeps its numbers.
struct CgroupFiles {
  const char* limit;
  const char* usage;
  std::string_view reclaimable;  // the line of memory.stat, of the group and all below it
};

constexpr CgroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr CgroupFiles kVersion2 = {"memory.max", "memory.current", "inactive_file"};

std::optional<std::uint64_t> parse_number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

/// The number in a file that holds nothing else; nothing if there is no such file or it says "max".
std::optional<std::uint64_t> read_number(const fs::path& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  return parse_number(word);
}

/// The number after `name` in a file of lines "name number".
std::optional<std::uint64_t> read_field(const fs::path& path, std::string_view name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (!line.starts_with(name)) continue;
    const std::size_t begin = line.find_first_not_of(" \t", name.size());
    if (begin == name.size() || begin == std::string::npos) continue;
    return parse_number(std::string_view(line).substr(begin));
  }
  return std::nullopt;
}

/// Version 1 writes the largest number of pages for none.
std::optional<std::uint64_t> limit_of(const fs::path& group, const CgroupFiles& files) {
  constexpr std::uint64_t most = std::uint64_t{1} << 60U;
  const auto limit = read_number(group / files.limit);
  return limit && *limit < most ? limit : std::nullopt;
}

std::uint64_t limit_or_none(const fs::path& group, const CgroupFiles& files) {
  return limit_of(group, files).value_or(kUnlimited);
}

std::uint64_t left_in_group(const fs::path& group, const CgroupFiles& files) {
  const auto limit = limit_of(group, files);
  const auto usage = read_number(group / files.usage);
  if (!limit || !usage) return kUnlimited;
  const std::uint64_t reclaimable = read_field(group / "memory.stat", files.reclaimable).value_or(0);
  const std::uint64_t used = *usage - std::min(*usage, reclaimable);
  return *limit - std::min(*limit, used);
}

/// What is asked of a group: what it leaves, or its limit.
using Measure = std::uint64_t (*)(const fs::path& group, const CgroupFiles& files);

/// The least of `group` below `mount` and the groups around it. A container often sees its own group as the mount
/// itself and is told a path that only the machine knows: groups that are not there set no limit.
std::uint64_t least_in_hierarchy(const fs::path& mount, std::string_view group, const CgroupFiles& files,
                                 Measure measure) {
  const fs::path relative = fs::path(group).relative_path().lexically_normal();
  std::uint64_t least = measure(mount, files);
  fs::path directory = mount;
  for (const fs::path& part : relative) {
    if (part == "..") break;  // outside what this process may see
    directory /= part;
    least = std::min(least, measure(directory, files));
  }
  return least;
}

std::uint64_t least_in_cgroups(const fs::path& root, Measure measure) {
  const fs::path mount = root / "sys/fs/cgroup";
  std::ifstream file(root / "proc/self/cgroup");
  std::uint64_t least = kUnlimited;
  std::string line;  // "hierarchy:controllers:path"; version 2 is "0::path"
  while (std::getline(file, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string_view group = std::string_view(line).substr(second + 1);
    if (controllers == ",,") least = std::min(least, least_in_hierarchy(mount, group, kVersion2, measure));
    if (controllers.find(",memory,") != std::string::npos) {
      least = std::min(least, least_in_hierarchy(mount / "memory", group, kVersion1, measure));
    }
  }
  return least;
}

}  // namespace

std::uint64_t available_memory_bytes(const fs::path& root) {
  const fs::path meminfo = root / "proc/meminfo";
  const auto available_kib = read_field(meminfo, "MemAvailable:");
  if (!available_kib) {
    const bool is_there = std::ifstream(meminfo).is_open();
    throw IoError("cannot tell how much memory is available: " +
                      (is_there ? "no MemAvailable in " + meminfo.string()
                                : "opening " + meminfo.string() + " failed: " + std::generic_category().message(errno)),
                  "set device.memory and host.memory, so that nobody needs to know");
  }
  return std::min(*available_kib * 1024, least_in_cgroups(root, left_in_group));
}

std::optional<std::uint64_t> memory_limit_bytes(const fs::path& root) {
  const std::uint64_t limit = least_in_cgroups(root, limit_or_none);
  return limit == kUnlimited ? std::nullopt : std::optional(limit);
}

std::optional<std::uint64_t> peak_resident_bytes(const fs::path& root) {
  const auto peak_kib = read_field(root / "proc/self/status", "VmHWM:");
  return peak_kib ? std::optional(*peak_kib * 1024) : std::nullopt;
}

}  // namespace terrace
