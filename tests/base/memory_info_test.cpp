#include "base/memory_info.h"

#include <string>

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

constexpr std::uint64_t kMiB = 1ULL << 20;

std::string bytes(std::uint64_t mib) { return std::to_string(mib * kMiB) + "\n"; }

/// A machine with 1000 MiB available.
class MemoryInfo : public testing::Test {
 protected:
  MemoryInfo() {
    machine_.write("proc/meminfo", "MemTotal:        4096000 kB\nMemFree:  1 kB\nMemAvailable:    1024000 kB\n");
  }

  void process_is_in(const std::string& lines) { machine_.write("proc/self/cgroup", lines); }

  void version2(const std::string& group, const std::string& limit, std::uint64_t used_mib, std::uint64_t cache_mib) {
    const std::string folder = "sys/fs/cgroup/" + group + "/";
    machine_.write(folder + "memory.max", limit);
    machine_.write(folder + "memory.current", bytes(used_mib));
    machine_.write(folder + "memory.stat", "anon 5\nfile 7\ninactive_file_other 1\ninactive_file " + bytes(cache_mib));
  }

  void version1(const std::string& group, std::uint64_t limit_mib, std::uint64_t used_mib, std::uint64_t cache_mib) {
    const std::string folder = "sys/fs/cgroup/memory/" + group + "/";
    machine_.write(folder + "memory.limit_in_bytes", bytes(limit_mib));
    machine_.write(folder + "memory.usage_in_bytes", bytes(used_mib));
    machine_.write(folder + "memory.stat", "inactive_file 0\ntotal_inactive_file " + bytes(cache_mib));
  }

  std::uint64_t available_mib() const { return available_memory_bytes(machine_.path()) / kMiB; }

  TemporaryFolder machine_;
};

TEST_F(MemoryInfo, is_what_the_machine_has_available_where_nothing_limits_it) {
  EXPECT_EQ(available_mib(), 1000U);
  process_is_in("0::/\n");
  version2("", "max\n", 5, 0);
  EXPECT_EQ(available_mib(), 1000U);
}

TEST_F(MemoryInfo, is_the_limit_of_the_control_group_less_its_usage) {
  process_is_in("0::/user/job\n");
  version2("user/job", bytes(600), 150, 0);
  EXPECT_EQ(available_mib(), 450U);
}

TEST_F(MemoryInfo, counts_a_limit_of_version_1) {
  process_is_in("9:cpu,cpuacct:/other\n4:memory:/job\n0::/\n");
  version1("job", 600, 150, 0);
  EXPECT_EQ(available_mib(), 450U);
}

TEST_F(MemoryInfo, counts_the_limits_of_the_groups_around) {
  process_is_in("0::/user/job\n");
  version2("user/job", bytes(600), 100, 0);
  version2("user", bytes(700), 500, 0);
  EXPECT_EQ(available_mib(), 200U);
}

TEST_F(MemoryInfo, does_not_count_the_limits_of_other_groups) {
  process_is_in("0::/mine\n");
  version2("other", bytes(10), 5, 0);
  EXPECT_EQ(available_mib(), 1000U);
}

TEST_F(MemoryInfo, does_not_count_page_cache_as_used) {
  process_is_in("0::/job\n");
  version2("job", bytes(600), 500, 300);
  EXPECT_EQ(available_mib(), 400U);
  process_is_in("4:memory:/job\n");
  version1("job", 600, 500, 100);
  EXPECT_EQ(available_mib(), 200U);
}

TEST_F(MemoryInfo, sees_the_limit_of_a_container_that_is_told_its_path_outside) {
  process_is_in("4:memory:/docker/0123\n");
  version1("", 600, 100, 0);
  EXPECT_EQ(available_mib(), 500U);
  process_is_in("0::/../../elsewhere\n");
  version2("", bytes(300), 100, 0);
  EXPECT_EQ(available_mib(), 200U);
}

TEST_F(MemoryInfo, tells_the_least_limit_whatever_is_used) {
  EXPECT_EQ(memory_limit_bytes(machine_.path()), std::nullopt);
  process_is_in("0::/user/job\n");
  version2("user/job", "max\n", 100, 0);
  EXPECT_EQ(memory_limit_bytes(machine_.path()), std::nullopt);
  version2("user", bytes(700), 500, 0);
  EXPECT_EQ(memory_limit_bytes(machine_.path()), 700 * kMiB);
  version2("user/job", bytes(600), 100, 0);
  EXPECT_EQ(memory_limit_bytes(machine_.path()), 600 * kMiB);
}

TEST_F(MemoryInfo, takes_the_largest_number_of_version_1_for_no_limit) {
  process_is_in("4:memory:/job\n");
  version1("job", 600, 150, 0);
  machine_.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(memory_limit_bytes(machine_.path()), std::nullopt);
  EXPECT_EQ(available_mib(), 1000U);
}

TEST_F(MemoryInfo, is_zero_where_the_limit_is_used_up) {
  process_is_in("0::/job\n");
  version2("job", bytes(100), 120, 0);
  EXPECT_EQ(available_mib(), 0U);
}

TEST_F(MemoryInfo, throws_where_the_machine_does_not_say) {
  machine_.write("proc/meminfo", "MemTotal: 4096000 kB\n");
  EXPECT_THROW(available_memory_bytes(machine_.path()), IoError);
}

TEST_F(MemoryInfo, says_why_the_file_that_tells_cannot_be_opened) {
  try {
    available_memory_bytes(machine_.path() / "nowhere");
    FAIL() << "it was told";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("proc/meminfo failed: No such file or directory"), std::string::npos)
        << error.what();
  }
}

TEST_F(MemoryInfo, tells_what_the_process_has_held_at_most) {
  EXPECT_EQ(peak_resident_bytes(machine_.path()), std::nullopt);
  machine_.write("proc/self/status", "Name:\tterrace\nVmPeak:\t   9000 kB\nVmHWM:\t   5120 kB\nVmRSS:\t   4096 kB\n");
  EXPECT_EQ(peak_resident_bytes(machine_.path()), 5 * kMiB);
}

TEST(MemoryInfoOfThisMachine, is_more_than_nothing) {
  EXPECT_GT(available_memory_bytes(), kMiB);
  EXPECT_GT(peak_resident_bytes().value(), kMiB);
}

}  // namespace
}  // namespace terrace
