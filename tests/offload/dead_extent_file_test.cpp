#include "offload/dead_extent_file.h"

#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/choose_engine.h"
#include "offload/file_io.h"
#include "offload/nvme_store.h"
#include "tests/base/temporary_folder.h"
#include "tests/offload/aligned_bytes.h"
#include "tests/offload/store_io.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using enum DeadExtentFile::Content;

constexpr std::size_t kExtent = 8192;
constexpr std::uint64_t kExtents = 6;

/// The file of a store whose process was killed at the end of `use`.
class DeadExtentFileTest : public testing::Test {
 protected:
  fs::path file_after(const std::function<void(NvmeStore&, StoreIo&)>& use) {
    const pid_t child = ::fork();
    if (child == 0) {
      const auto engine = make_io_engine("auto");
      StoreIo io(*engine);
      NvmeStore store({folder_.path()}, extent_file_bytes(kExtent, kExtents), kExtent);
      use(store, io);
      ::raise(SIGKILL);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status));
    return fs::directory_iterator(folder_.path())->path();
  }
  /// All extents hold their numbers' patterns, written in their order.
  fs::path full_file() {
    return file_after([](NvmeStore& store, StoreIo& io) {
      for (const ExtentId extent : store.reserve(kExtents)) io.write(store, extent, content(extent));
    });
  }
  static AlignedBytes content(ExtentId extent) {
    const auto number = static_cast<std::size_t>(extent);
    return random_bytes(kExtent - 100 * number, number);
  }
  static std::vector<DeadExtentFile::Content> contents(const fs::path& path) {
    std::vector<DeadExtentFile::Content> result;
    for (const DeadExtentFile::Extent& each : DeadExtentFile(path).survey()) result.push_back(each.content);
    return result;
  }
  static void change_a_byte(const fs::path& path, std::uint64_t offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(byte);
  }

  TemporaryFolder folder_;
};

TEST_F(DeadExtentFileTest, what_was_written_is_whole_with_its_bytes_and_its_turn) {
  const DeadExtentFile file(full_file());
  const std::vector<DeadExtentFile::Extent> extents = file.survey();
  ASSERT_EQ(extents.size(), kExtents);
  for (std::uint64_t i = 0; i < kExtents; ++i) {
    EXPECT_EQ(extents[i].content, whole);
    EXPECT_EQ(extents[i].sequence, i + 1);
    const AlignedBytes expected = content(ExtentId{i});
    EXPECT_EQ(extents[i].bytes, expected.size());
    EXPECT_TRUE(std::ranges::equal(file.read(i), expected));
  }
  EXPECT_THROW(file.read(kExtents), LogicError);
}

TEST_F(DeadExtentFileTest, of_writes_that_ended_together_those_are_whole_that_did_not_fail) {
  const fs::path path = file_after([](NvmeStore& store, StoreIo& io) {
    std::vector<AlignedBytes> blocks(kExtents, AlignedBytes(kExtent));
    std::vector<NvmeStore::EndOfWrite> ends;
    for (const ExtentId extent : store.reserve(kExtents)) {
      AlignedBytes& block = blocks[ends.size()];
      std::ranges::copy(content(extent), block.begin());
      const std::exception_ptr error = io.run(store.begin_write(extent, block.data(), content(extent).size()));
      ends.push_back({extent, extent == ExtentId{2} ? std::make_exception_ptr(IoError("lost")) : error});
    }
    std::ranges::reverse(ends);
    store.end_writes(ends);
  });
  EXPECT_EQ(contents(path), (std::vector{whole, whole, nothing, whole, whole, whole}));
  for (const std::uint64_t extent : {0, 1, 3, 4, 5}) {
    EXPECT_TRUE(std::ranges::equal(DeadExtentFile(path).read(extent), content(ExtentId{extent})));
  }
}

TEST_F(DeadExtentFileTest, what_was_never_written_or_given_back_holds_nothing) {
  const fs::path path = file_after([](NvmeStore& store, StoreIo& io) {
    const std::vector<ExtentId> extents = store.reserve(5);
    for (const ExtentId extent : {extents[0], extents[1], extents[2], extents[3]}) {
      io.write(store, extent, content(extent));
    }
    store.release(std::vector<ExtentId>{extents[1], extents[2]});
    store.retire(extents[3]);
  });
  EXPECT_EQ(contents(path), (std::vector{whole, nothing, nothing, nothing, nothing, nothing}));
  EXPECT_THROW(DeadExtentFile(path).read(1), CorruptData);
}

TEST_F(DeadExtentFileTest, what_was_only_in_part_written_anew_is_damaged) {
  const fs::path path = file_after([](NvmeStore& store, StoreIo& io) {
    const std::vector<ExtentId> extents = store.reserve(2);
    for (const ExtentId extent : extents) io.write(store, extent, content(extent));
    AlignedBytes fresh = random_bytes(kExtent, 77);
    const IoOperation torn = store.begin_write(extents[1], fresh.data(), kExtent);
    write_file_at(*torn.file, torn.offset, std::span<const std::byte>(fresh).first(4096));
  });
  EXPECT_EQ(contents(path), (std::vector{whole, damaged, nothing, nothing, nothing, nothing}));
  EXPECT_THROW(DeadExtentFile(path).read(1), CorruptData);
}

TEST_F(DeadExtentFileTest, what_was_begun_and_did_not_reach_the_drive_is_what_it_was_before) {
  const fs::path path = file_after([](NvmeStore& store, StoreIo& io) {
    const ExtentId extent = store.reserve(1).front();
    io.write(store, extent, content(extent));
    AlignedBytes fresh = random_bytes(kExtent, 77);
    store.begin_write(extent, fresh.data(), kExtent);
  });
  EXPECT_TRUE(std::ranges::equal(DeadExtentFile(path).read(0), content(ExtentId{0})));
}

TEST_F(DeadExtentFileTest, a_byte_that_changed_is_found_in_content_and_record_alike) {
  const fs::path path = full_file();
  change_a_byte(path, ExtentFileHeader::kBytes + 2 * kExtent + 5000);
  change_a_byte(path, records_offset(kExtent, kExtents) + 4 * ExtentRecord::kBytes + 17);
  EXPECT_EQ(contents(path), (std::vector{whole, whole, damaged, whole, damaged, whole}));
}

TEST_F(DeadExtentFileTest, a_record_is_not_taken_for_that_of_another_extent) {
  const fs::path path = full_file();
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  std::string record(ExtentRecord::kBytes, '\0');
  file.seekg(static_cast<std::streamoff>(records_offset(kExtent, kExtents)));
  file.read(record.data(), ExtentRecord::kBytes);
  file.write(record.data(), ExtentRecord::kBytes);  // the second is the first now
  file.close();
  EXPECT_EQ(contents(path)[1], damaged);
}

TEST_F(DeadExtentFileTest, the_file_of_a_live_store_is_refused) {
  const NvmeStore store({folder_.path()}, extent_file_bytes(kExtent, kExtents), kExtent);
  EXPECT_THROW(DeadExtentFile(store.files().front()), IoError);
}

TEST_F(DeadExtentFileTest, what_is_not_ours_is_refused) {
  const fs::path path = full_file();
  const auto changed_at = [&](std::uint64_t offset) {
    const fs::path copy = folder_.path() / "copy";
    fs::copy_file(path, copy, fs::copy_options::overwrite_existing);
    change_a_byte(copy, offset);
    return copy;
  };
  EXPECT_THROW(DeadExtentFile(changed_at(0)), CorruptData) << "another magic";
  EXPECT_THROW(DeadExtentFile(changed_at(offsetof(ExtentFileHeader, version))), CorruptData);
  EXPECT_THROW(DeadExtentFile(changed_at(offsetof(ExtentFileHeader, extent_bytes))), CorruptData);
  EXPECT_THROW(DeadExtentFile(changed_at(offsetof(ExtentFileHeader, extent_count) + 3)), CorruptData) << "too many";
  fs::resize_file(folder_.path() / "copy", 100);
  EXPECT_THROW(DeadExtentFile(folder_.path() / "copy"), CorruptData);
  EXPECT_THROW(DeadExtentFile(folder_.path()), Error) << "a folder";
  EXPECT_THROW(DeadExtentFile(folder_.path() / "missing"), IoError);
}

TEST_F(DeadExtentFileTest, a_forked_copy_of_a_store_changes_nothing) {
  const auto engine = make_io_engine("auto");
  StoreIo io(*engine);
  const fs::path path = file_after([&](NvmeStore& store, StoreIo& own) {
    const std::vector<ExtentId> extents = store.reserve(1);
    own.write(store, extents[0], content(extents[0]));
    const pid_t child = ::fork();
    if (child == 0) {
      store.release(extents);
      ::_exit(0);
    }
    ::waitpid(child, nullptr, 0);
  });
  EXPECT_EQ(contents(path)[0], whole);
}

}  // namespace
}  // namespace terrace
