#include "offload/volume.h"

#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

/// A machine whose /proc and /sys are files of the test, and a folder on it.
class VolumeTest : public testing::Test {
 protected:
  VolumeTest() : folder_(machine_.path() / "data") { fs::create_directories(folder_ / "with blank"); }

  void mounts(const std::string& lines) { machine_.write("proc/self/mountinfo", lines); }

  /// A line of mountinfo.
  std::string mount(const std::string& device, const fs::path& point, const std::string& rest) const {
    std::string escaped = point.string();
    if (const auto blank = escaped.find(' '); blank != std::string::npos) escaped.replace(blank, 1, "\\040");
    return "36 35 " + device + " / " + escaped + " rw shared:1 master:2 - " + rest + " rw\n";
  }

  /// A drive as /sys shows it, below devices.
  void drive(const std::string& name, const std::string& model, const std::string& rotational) {
    machine_.write("sys/devices/pci/" + name + "/queue/rotational", rotational + "\n");
    machine_.write("sys/devices/pci/" + name + "/device/model", model + "\n");
  }

  void link(const fs::path& name, const fs::path& to) {
    fs::create_directories((machine_.path() / name).parent_path());
    fs::create_directory_symlink(machine_.path() / to, machine_.path() / name);
  }

  Volume volume() const { return volume_of(folder_, machine_.path()); }

  TemporaryFolder machine_;
  fs::path folder_;
};

TEST_F(VolumeTest, names_the_file_system_and_the_drive_of_a_partition) {
  drive("nvme0n1", "FastDrive 9000       ", "0");
  machine_.write("sys/devices/pci/nvme0n1/nvme0n1p2/partition", "2\n");
  link("sys/dev/block/259:2", "sys/devices/pci/nvme0n1/nvme0n1p2");
  mounts(mount("8:1", "/", "xfs /dev/sda1") + mount("259:2", folder_, "ext4 /dev/nvme0n1p2"));
  const Volume found = volume();
  EXPECT_EQ(found.file_system, "ext4");
  EXPECT_EQ(found.drive, "nvme0n1");
  EXPECT_EQ(found.model, "FastDrive 9000");
  EXPECT_EQ(found.rotational, false);
  EXPECT_GT(found.total_bytes, 0U);
  EXPECT_LE(found.free_bytes, found.total_bytes);
}

TEST_F(VolumeTest, sees_through_a_mapping_to_the_drive_below) {
  drive("sda", "Turning", "1");
  machine_.write("sys/devices/pci/sda/sda3/partition", "3\n");
  link("sys/devices/virtual/dm-0/slaves/sda3", "sys/devices/pci/sda/sda3");
  link("sys/dev/block/252:0", "sys/devices/virtual/dm-0");
  mounts(mount("252:0", "/", "ext4 /dev/mapper/root"));
  EXPECT_EQ(volume().drive, "sda");
  EXPECT_EQ(volume().rotational, true);
}

TEST_F(VolumeTest, finds_the_drive_by_the_source_where_the_number_is_no_device_s) {
  drive("nvme1n1", "Other", "0");
  link("sys/class/block/nvme1n1", "sys/devices/pci/nvme1n1");
  mounts(mount("0:31", "/", "btrfs /dev/nvme1n1"));
  EXPECT_EQ(volume().file_system, "btrfs");
  EXPECT_EQ(volume().model, "Other");
}

TEST_F(VolumeTest, takes_the_nearest_mount_and_of_several_on_one_place_the_last) {
  const fs::path inner = folder_ / "with blank";
  mounts(mount("0:1", "/", "xfs none") + mount("0:2", folder_, "ext3 none") + mount("0:3", inner, "ext4 none") +
         mount("0:4", inner, "tmpfs none") + mount("0:5", folder_.string() + "base", "vfat none"));
  EXPECT_EQ(volume_of(inner, machine_.path()).file_system, "tmpfs");
  EXPECT_EQ(volume().file_system, "ext3");
}

TEST_F(VolumeTest, leaves_out_what_the_system_does_not_tell) {
  EXPECT_EQ(volume().file_system, "");
  mounts("nonsense\n" + mount("0:5", "/", "tmpfs tmpfs"));
  const Volume found = volume();
  EXPECT_EQ(found.file_system, "tmpfs");
  EXPECT_EQ(found.drive, "");
  EXPECT_EQ(found.rotational, std::nullopt);
  EXPECT_EQ(volume_of("/no/such/folder", machine_.path()).total_bytes, 0U);
}

TEST(Volume, of_this_machine_has_a_file_system) {
  const Volume found = volume_of(fs::temp_directory_path());
  EXPECT_NE(found.file_system, "");
  EXPECT_GT(found.total_bytes, 0U);
}

}  // namespace
}  // namespace terrace
