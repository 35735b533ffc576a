#include "offload/io_progress.h"

#include <cerrno>
#include <string>

#include <gtest/gtest.h>

#include "base/error.h"

namespace terrace {
namespace {

using Direction = IoOperation::Direction;

const IoFile kFile{-1, "/data/file"};
std::byte memory[8192];

IoProgress transfer_of(Direction direction, std::size_t bytes) {
  return IoProgress({direction, &kFile, 4096, memory, bytes});
}

std::string error_of(const IoProgress& transfer) {
  if (!transfer.over()) return "not over";
  if (!transfer.completion().error) return "none";
  try {
    std::rethrow_exception(transfer.completion().error);
  } catch (const IoError& error) {
    return error.message();
  }
}

TEST(IoProgress, asks_for_what_is_left_after_a_short_result) {
  IoProgress transfer = transfer_of(Direction::read, 1000);
  transfer.advance(300);
  EXPECT_EQ(transfer.memory(), memory + 300);
  EXPECT_EQ(transfer.offset(), 4396U);
  EXPECT_EQ(transfer.bytes(), 700U);
  transfer.advance(700);
  EXPECT_EQ(error_of(transfer), "none");
}

TEST(IoProgress, asks_again_after_an_interruption_or_a_passing_shortage_but_not_for_ever) {
  for (const int error_number : {EINTR, EAGAIN}) {
    IoProgress transfer = transfer_of(Direction::write, 1000);
    transfer.advance(300);
    for (int i = 0; i < 10; ++i) transfer.advance(-error_number);
    EXPECT_FALSE(transfer.over());
    EXPECT_EQ(transfer.bytes(), 700U);
    for (int i = 0; i < 1000000 && !transfer.over(); ++i) transfer.advance(-error_number);
    EXPECT_NE(error_of(transfer).find("write of 1000 B at offset 4096 to /data/file failed: "), std::string::npos);
  }
}

TEST(IoProgress, never_asks_for_more_than_the_kernel_takes) {
  constexpr std::size_t kHuge = std::size_t{5} << 30;
  IoProgress transfer = transfer_of(Direction::write, kHuge);
  std::size_t pieces = 0;
  for (; !transfer.over(); ++pieces) {
    ASSERT_LE(transfer.bytes(), std::size_t{0x7ffff000});
    ASSERT_EQ(transfer.offset() % 4096, 0U) << "of no use to a direct file";
    transfer.advance(static_cast<std::int64_t>(transfer.bytes()));
  }
  EXPECT_EQ(pieces, 5U);
  EXPECT_EQ(error_of(transfer), "none");
}

TEST(IoProgress, tells_the_end_of_a_file_from_a_write_that_takes_nothing) {
  IoProgress read = transfer_of(Direction::read, 1000), write = transfer_of(Direction::write, 1000);
  for (IoProgress* transfer : {&read, &write}) {
    transfer->advance(10);
    transfer->advance(0);
  }
  EXPECT_EQ(error_of(read), "nvme: read of 1000 B at offset 4096 from /data/file failed: end of file after 10 B");
  EXPECT_EQ(error_of(write), "nvme: write of 1000 B at offset 4096 to /data/file failed: no byte was taken after 10 B");
}

TEST(IoProgress, takes_a_refusal_to_go_on_within_a_block_for_the_end_of_a_direct_file) {
  IoProgress cut = transfer_of(Direction::read, 8192), whole = transfer_of(Direction::read, 8192);
  cut.advance(100);
  cut.advance(-EINVAL);
  EXPECT_NE(error_of(cut).find("end of file after 100 B"), std::string::npos);
  whole.advance(4096);
  whole.advance(-EINVAL);
  EXPECT_NE(error_of(whole).find("(EINVAL)"), std::string::npos);
}

TEST(IoProgress, of_nothing_is_over_at_once) { EXPECT_EQ(error_of(transfer_of(Direction::read, 0)), "none"); }

}  // namespace
}  // namespace terrace
