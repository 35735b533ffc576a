#include "offload/huge_pages.h"

#include <cstdint>
#include <string>
#include <sys/mman.h>

#include <gtest/gtest.h>

#include "offload/emulated_device.h"
#include "tests/base/noted.h"
#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

constexpr const char* kSetting = "sys/kernel/mm/transparent_hugepage/enabled";

TEST(HugePages, are_there_where_the_kernel_gives_them_to_who_asks) {
  const TemporaryFolder machine;
  for (const char* words : {"always [madvise] never\n", "[always] madvise never\n"}) {
    machine.write(kSetting, words);
    EXPECT_EQ(why_no_huge_pages(machine.path()), "") << words;
  }
}

TEST(HugePages, are_not_there_where_the_kernel_says_so_or_says_nothing) {
  const TemporaryFolder machine;
  EXPECT_NE(why_no_huge_pages(machine.path()).find("no transparent huge pages"), std::string::npos);
  machine.write(kSetting, "always madvise [never]\n");
  EXPECT_NE(why_no_huge_pages(machine.path()).find("enabled says [never]"), std::string::npos);
}

TEST(HugePages, may_begin_a_mapping_of_any_size) {
  for (const std::size_t bytes : {std::size_t{1}, huge_page_bytes - 4096, huge_page_bytes, 3 * huge_page_bytes + 1}) {
    std::byte* const memory = map_from_huge_page(bytes);
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % huge_page_bytes, 0u);
    memory[0] = memory[bytes - 1] = std::byte{1};
    EXPECT_EQ(::munmap(memory, bytes), 0);
  }
  EXPECT_EQ(map_from_huge_page(std::size_t{1} << 62U), nullptr);
}

TEST(HugePages, are_a_fallback_of_the_emulated_device_where_there_are_none) {
  const EmulatedDevice device(4096);
  EXPECT_EQ(noted("device: its memory comes in small pages").empty(), why_no_huge_pages().empty());
}

}  // namespace
}  // namespace terrace
