#include "offload/file_io.h"

#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/offload/aligned_bytes.h"
#include "tests/offload/open_file.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

template <typename Action>
std::string io_error_of(Action action) {
  try {
    action();
  } catch (const IoError& error) {
    return error.what();
  }
  return "no IoError";
}

TEST(FileIo, reads_back_what_was_written) {
  const OpenFile file;
  const AlignedBytes written = random_bytes(777, 1);
  write_file_at(file.get(), 50001, written);
  AlignedBytes read(written.size());
  read_file_at(file.get(), 50001, read);
  EXPECT_EQ(read, written);
}

TEST(FileIo, an_empty_transfer_touches_nothing) {
  const IoFile closed{-1, "closed"};
  EXPECT_NO_THROW(read_file_at(closed, 0, {}));
  EXPECT_NO_THROW(write_file_at(closed, 0, {}));
}

TEST(FileIo, names_path_offset_length_cause_and_way_out) {
  const OpenFile full("/dev/full", O_RDWR);
  EXPECT_EQ(io_error_of([&] { write_file_at(full.get(), 1024, random_bytes(512, 4)); }),
            "nvme: write of 512 B at offset 1024 to /dev/full failed: No space left on device (ENOSPC)\n"
            "  hint: free space or lower nvme.memory");
  AlignedBytes bytes(8);
  EXPECT_EQ(io_error_of([&] {
              read_file_at({-1, "/data/gone"}, 16, bytes);
            }),
            "nvme: read of 8 B at offset 16 from /data/gone failed: Bad file descriptor (EBADF)");
}

TEST(FileIo, sets_space_aside_and_grows_the_file_for_it) {
  const OpenFile file;
  ASSERT_TRUE(set_space_aside(file.get(), 4096, 8192));
  EXPECT_EQ(fs::file_size(file.get().path), 12288U);
}

TEST(FileIo, tells_at_reservation_that_space_is_short) {
  const OpenFile file;
  const FileSizeLimit limit(4096);
  const std::string message = io_error_of([&] { set_space_aside(file.get(), 0, 8192); });
  EXPECT_NE(message.find("reservation of 8192 B at offset 0 in "), std::string::npos) << message;
  EXPECT_NE(message.find("(EFBIG)"), std::string::npos) << message;
}

TEST(FileIo, says_when_a_file_cannot_set_space_aside) {
  const OpenFile file("/dev/full", O_RDWR);
  std::string message = "none";
  bool reserved = true;
  try {
    reserved = set_space_aside(file.get(), 0, 4096);
  } catch (const IoError& error) {
    message = error.what();
  }
  // A device has no notion of it; some kernels answer "not supported", others "no such device".
  EXPECT_TRUE(!reserved || message.find("(ENODEV)") != std::string::npos) << message;
}

}  // namespace
}  // namespace terrace
