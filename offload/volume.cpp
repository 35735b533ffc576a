#include "offload/volume.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string_view>
#include <sys/statvfs.h>
#include <system_error>

#include "base/text.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

struct Mount {
  std::string device;  // "259:2"
  fs::path point;
  std::string file_system;
  fs::path source;  // "/dev/nvme0n1p2"
};

/// Blanks in paths are written as octal escapes.
std::string unescaped(const std::string& text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto digit = [&](std::size_t at) { return static_cast<unsigned>(text[at] - '0'); };
    if (text[i] == '\\' && i + 3 < text.size() && digit(i + 1) < 4 && digit(i + 2) < 8 && digit(i + 3) < 8) {
      plain += static_cast<char>(digit(i + 1) * 64 + digit(i + 2) * 8 + digit(i + 3));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

/// A line of mountinfo: "36 35 98:0 /inside /mnt/point options [optional fields] - ext4 /dev/source options".
std::optional<Mount> parse_mount(const std::string& line) {
  std::istringstream words(line);
  std::string skipped, point, source, word;
  Mount mount;
  if (!(words >> skipped >> skipped >> mount.device >> skipped >> point)) return std::nullopt;
  while (words >> word && word != "-") {
  }
  if (!(words >> mount.file_system >> source)) return std::nullopt;
  mount.point = unescaped(point);
  mount.source = unescaped(source);
  return mount;
}

bool holds(const fs::path& point, const fs::path& folder) {
  if (point == "/") return true;
  return std::mismatch(point.begin(), point.end(), folder.begin(), folder.end()).first == point.end();
}

/// The mount that the folder is seen through: of those around it the nearest, of several on one place the last.
std::optional<Mount> mount_of(const fs::path& folder, const fs::path& root) {
  std::ifstream file(root / "proc/self/mountinfo");
  std::optional<Mount> nearest;
  for (std::string line; std::getline(file, line);) {
    std::optional<Mount> mount = parse_mount(line);
    if (!mount || !holds(mount->point, folder)) continue;
    if (!nearest || mount->point.native().size() >= nearest->point.native().size()) nearest = std::move(mount);
  }
  return nearest;
}

/// The folder that describes a mount's drive: not the partition, and not the mapping over it. Empty where it is not
/// seen.
fs::path drive_folder(const Mount& mount, const fs::path& root) {
  std::error_code error;
  fs::path folder = fs::canonical(root / "sys/dev/block" / mount.device, error);
  if (error) {  // file systems of several devices, such as btrfs, have a number that is no device's
    const fs::path source = fs::weakly_canonical(mount.source, error);
    folder = fs::canonical(root / "sys/class/block" / source.filename(), error);
    if (error || source.parent_path() != "/dev") return {};
  }
  constexpr int most_layers = 8;
  for (int layer = 0; layer < most_layers; ++layer) {
    if (fs::exists(folder / "partition", error)) folder = folder.parent_path();
    const fs::directory_iterator below(folder / "slaves", error);
    if (error || below == fs::directory_iterator()) break;
    folder = fs::canonical(below->path(), error);
    if (error) return {};
  }
  return folder;
}

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return std::string(trimmed(line));
}

}  // namespace

Volume volume_of(const fs::path& folder, const fs::path& root) {
  Volume volume;
  struct statvfs space {};
  if (::statvfs(folder.c_str(), &space) == 0) {
    volume.total_bytes = static_cast<std::uint64_t>(space.f_blocks) * space.f_frsize;
    volume.free_bytes = static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize;
  }
  std::error_code error;
  const std::optional<Mount> mount = mount_of(fs::weakly_canonical(folder, error), root);
  if (!mount) return volume;
  volume.file_system = mount->file_system;
  const fs::path drive = drive_folder(*mount, root);
  if (drive.empty()) return volume;
  volume.drive = drive.filename().string();
  volume.model = first_line(drive / "device/model");
  const std::string rotational = first_line(drive / "queue/rotational");
  if (!rotational.empty()) volume.rotational = rotational != "0";
  return volume;
}

}  // namespace terrace
