#include "offload/huge_pages.h"

#include <string>

#include <gtest/gtest.h>

#include "offload/emulated_device.h"
#include "tests/base/noted.h"
#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

constexpr const char* kSetting = "sys/kernel/mm/transparent_hugepage/shmem_enabled";

TEST(HugePages, are_there_where_the_kernel_gives_them_to_who_asks) {
  const TemporaryFolder machine;
  for (const char* words : {"always within_size [advise] never deny force\n", "[always] within_size advise never\n",
                            "always [within_size] advise never\n"}) {
    machine.write(kSetting, words);
    EXPECT_EQ(why_no_huge_pages(machine.path()), "") << words;
  }
}

TEST(HugePages, are_not_there_where_the_kernel_says_so_or_says_nothing) {
  const TemporaryFolder machine;
  EXPECT_NE(why_no_huge_pages(machine.path()).find("no transparent huge pages"), std::string::npos);
  machine.write(kSetting, "always within_size advise [never] deny force\n");
  EXPECT_NE(why_no_huge_pages(machine.path()).find("shmem_enabled says [never]"), std::string::npos);
  machine.write(kSetting, "always within_size advise never [deny] force\n");
  EXPECT_NE(why_no_huge_pages(machine.path()).find("says [deny]"), std::string::npos);
}

TEST(HugePages, are_a_fallback_of_the_emulated_device_where_there_are_none) {
  const EmulatedDevice device(4096);
  EXPECT_EQ(noted("device: its memory comes in small pages").empty(), why_no_huge_pages().empty());
}

}  // namespace
}  // namespace terrace
