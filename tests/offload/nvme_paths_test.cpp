#include "offload/nvme_paths.h"

#include <cstring>
#include <filesystem>
#include <string>
#include <sys/statvfs.h>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/extent_file.h"
#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

constexpr std::size_t kExtent = 4096;

TEST(NvmePaths, share_the_capacity_evenly_less_a_header_each) {
  EXPECT_EQ(extents_a_path(2, 2 * extent_file_bytes(kExtent, 3) + 100, kExtent), 3U);
  EXPECT_EQ(extents_a_path(1, extent_file_bytes(kExtent, 1), kExtent), 1U);
  EXPECT_THROW(extents_a_path(1, extent_file_bytes(kExtent, 1) - 1, kExtent), OutOfMemory);
}

TEST(NvmePaths, without_any_free_space_are_refused_by_name) {
  try {
    default_nvme_capacity({"/proc"});
    FAIL() << "it was taken";
  } catch (const IoError& error) {
    EXPECT_EQ(error.message(), "nvme: the file system of /proc has 0B free");
  }
}

TEST(NvmePaths, count_what_is_left_there_as_free_only_while_it_is_there) {
  const TemporaryFolder folder;
  constexpr std::size_t large_extent = std::size_t{1} << 20U;
  constexpr std::uint64_t left_over = std::uint64_t{256} << 20U;
  ExtentFileHeader header{};
  std::memcpy(header.magic, ExtentFileHeader::kMagic, sizeof header.magic);
  header.version = ExtentFileHeader::kVersion;
  header.extent_bytes = kExtent;
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes.resize(left_over, 'x');
  folder.write("terrace-1-2.extents", bytes);
  struct statvfs space {};
  ASSERT_EQ(::statvfs(folder.path().c_str(), &space), 0);
  const std::uint64_t free_bytes = static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize;
  // Others use the drive meanwhile: half of what is left over, either way.
  const std::uint64_t wanted = free_bytes + left_over / 2;
  EXPECT_THROW(require_nvme_room({folder.path()}, wanted, large_extent, Leftovers::removed), IoError);
  EXPECT_NO_THROW(require_nvme_room({folder.path()}, wanted, large_extent, Leftovers::still_there));
}

}  // namespace
}  // namespace terrace
