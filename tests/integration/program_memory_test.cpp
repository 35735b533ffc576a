// A block that is freed leaves nothing behind by which its memory, wherever it goes next, could be taken for a block.

#include "integration/program_memory.h"

#include <array>
#include <cstring>
#include <memory>

#include <gtest/gtest.h>

namespace terrace::testing {
namespace {

/// One block, always at the same place.
class OneBlock final : public BlockSource {
 public:
  std::byte* take(std::uint64_t bytes, Kind) override {
    EXPECT_LE(bytes, memory_.size());
    return memory_.data();
  }
  void give_back(std::byte* block, std::uint64_t, Kind) noexcept override {
    EXPECT_EQ(block, memory_.data());
    first_word_given_back = first_word();
  }
  /// Where a block's mark lies.
  std::uint64_t first_word() const {
    std::uint64_t word = 0;
    std::memcpy(&word, memory_.data(), sizeof(word));
    return word;
  }

  std::uint64_t first_word_given_back = 0;

 private:
  alignas(64) std::array<std::byte, 256> memory_{};
};

}  // namespace

TEST(ProgramMemory, clears_the_mark_of_a_block_before_its_memory_goes_back) {
  const auto source = std::make_shared<OneBlock>();
  c10::DataPtr data = allocate_from(source, 100, Kind::other);
  const std::uint64_t mark = source->first_word();
  EXPECT_NE(mark, 0u) << "no mark where this test looks for it";
  source->first_word_given_back = mark;
  data.clear();
  EXPECT_NE(source->first_word_given_back, mark) << "LibTorch's own allocator may get this memory next";
}

}  // namespace terrace::testing
