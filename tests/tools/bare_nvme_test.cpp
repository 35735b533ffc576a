#include "tools/bare_nvme.h"

#include <cstddef>
#include <fcntl.h>
#include <filesystem>
#include <string>
#include <unistd.h>

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/base/temporary_folder.h"
#include "tests/base/text_of.h"

namespace terrace {
namespace {

constexpr std::size_t kBlock = 4096;
constexpr std::size_t kBefore = kBlock;  // of another's, in front of the blocks
constexpr std::size_t kBlocks = 40;

std::string mixed_text(std::size_t bytes) {
  std::string text(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>((i * 2654435761U) >> 16U);
  return text;
}

bool goes_direct(const std::filesystem::path& path) {
  const int descriptor = open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  if (descriptor >= 0) close(descriptor);
  return descriptor >= 0;
}

BareNvme::Options in_place() { return {.block_bytes = kBlock, .depth = 4, .own_memory = true, .in_place = true}; }

class BareNvmeInPlace : public testing::Test {
 protected:
  void SetUp() override {
    if (!goes_direct(file_)) GTEST_SKIP() << "no direct files here";
  }

  const TemporaryFolder folder_;
  const std::string text_ = mixed_text(kBefore + kBlocks * kBlock);
  const std::filesystem::path file_ = folder_.write("blocks", text_);
};

TEST_F(BareNvmeInPlace, reads_and_writes_the_same_blocks_and_leaves_what_they_hold) {
  BareNvme loop({file_, kBefore}, kBlocks * kBlock, kBlocks * kBlock, in_place());
  for (int round = 1; round <= 2; ++round) {
    loop.load();
    EXPECT_GT(loop.seconds(kBlocks * kBlock, kBlocks * kBlock), 0);
    EXPECT_EQ(loop.blocks_moved(), 2 * kBlocks * static_cast<unsigned>(round));
    EXPECT_EQ(text_of(file_), text_) << "round " << round;
  }
}

TEST_F(BareNvmeInPlace, writes_what_its_blocks_held_when_they_were_brought_last) {
  BareNvme loop({file_, kBefore}, kBlocks * kBlock, kBlocks * kBlock, in_place());
  loop.load();
  const std::string later = std::string(text_.size(), 'x');
  folder_.write("blocks", later);
  loop.load();
  loop.seconds(kBlocks * kBlock, kBlocks * kBlock);
  EXPECT_EQ(text_of(file_), later);
}

TEST_F(BareNvmeInPlace, a_part_beyond_the_end_of_its_file_is_an_error) {
  BareNvme loop({file_, kBefore}, kBlocks * kBlock, (kBlocks + 1) * kBlock, in_place());
  EXPECT_THROW(loop.load(), IoError);
  EXPECT_EQ(text_of(file_), text_);
}

}  // namespace
}  // namespace terrace
