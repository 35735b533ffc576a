// An NVMe store on a drive that does wrong serves what was written or an error.

#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/choose_engine.h"
#include "offload/nvme_store.h"
#include "tests/offload/aligned_bytes.h"
#include "tests/offload/nvme_store_fixture.h"
#include "tests/offload/open_file.h"
#include "tests/offload/store_io.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

TEST_F(NvmeStoreTest, a_byte_flipped_on_disk_is_corrupt_data_with_path_offset_and_length) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const std::vector<ExtentId> extents = store.reserve(2);
  for (ExtentId extent : extents) write(store, extent, pattern(kExtent, number(extent)));
  const fs::path path = store.files().front();
  const std::uint64_t offset = 4096 + number(extents[1]) * kExtent;
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset + 5000));
    const char flipped = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(offset + 5000));
    file.put(flipped);
  }
  const std::string message = message_of<CorruptData>([&] { read_back(store, extents[1]); });
  EXPECT_CONTAINS(message, "8192 B at offset " + std::to_string(offset) + " of " + path.string());
  EXPECT_CONTAINS(message, "found");
  EXPECT_CONTAINS(message, "expected");
  EXPECT_EQ(read_back(store, extents[0]), pattern(kExtent, number(extents[0]))) << "its neighbour is whole";
  write(store, extents[1], pattern(kExtent, 77));
  EXPECT_EQ(read_back(store, extents[1]), pattern(kExtent, 77)) << "written again it is good";
}

TEST_F(NvmeStoreTest, a_file_that_was_cut_short_is_an_io_error) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const ExtentId extent = store.reserve(1).front();
  write(store, extent, pattern(kExtent, 1));
  fs::resize_file(store.files().front(), 4096 + 100);
  EXPECT_CONTAINS(message_of<IoError>([&] { read_back(store, extent); }), "end of file after 100 B");
}

TEST_F(NvmeStoreTest, a_failed_write_leaves_the_extent_unwritten_and_others_whole) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const std::vector<ExtentId> extents = store.reserve(2);
  for (ExtentId extent : extents) write(store, extent, pattern(kExtent, number(extent)));
  engine_.inject({.fault = Fault::short_transfer, .direction = IoOperation::Direction::write});
  EXPECT_THROW(write(store, extents[0], pattern(kExtent, 9)), IoError);
  engine_.heal();
  EXPECT_THROW(read_back(store, extents[0]), LogicError) << "half old, half new bytes must never be served";
  EXPECT_EQ(read_back(store, extents[1]), pattern(kExtent, number(extents[1])));
  write(store, extents[0], pattern(kExtent, 9));
  EXPECT_EQ(read_back(store, extents[0]), pattern(kExtent, 9));
}

TEST_F(NvmeStoreTest, a_failed_read_can_be_repeated) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const std::vector<ExtentId> extents = store.reserve(1);
  write(store, extents[0], pattern(kExtent, 1));
  engine_.inject({.fault = Fault::io_error, .direction = IoOperation::Direction::read});
  EXPECT_CONTAINS(message_of<IoError>([&] { read_back(store, extents[0]); }), "(EIO)");
  engine_.heal();
  EXPECT_EQ(read_back(store, extents[0]), pattern(kExtent, 1));
  EXPECT_NO_THROW(store.release(extents));
}

TEST_F(NvmeStoreTest, a_bit_flipped_on_the_way_is_corrupt_data_and_never_served) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const ExtentId extent = store.reserve(1).front();
  for (const auto direction : {IoOperation::Direction::write, IoOperation::Direction::read}) {
    engine_.inject({.fault = Fault::flipped_bit, .direction = direction});
    write(store, extent, pattern(kExtent, 1));
    EXPECT_THROW(read_back(store, extent), CorruptData);
    engine_.heal();
  }
  EXPECT_EQ(read_back(store, extent), pattern(kExtent, 1)) << "read again, what is on the drive is good";
}

TEST_F(NvmeStoreTest, serves_what_was_written_or_an_error_whatever_goes_wrong) {
  constexpr std::uint64_t kSeed = 7, kExtents = 16;
  FaultInjectingEngine engine(make_io_engine("auto"), kSeed);
  for (const Fault fault : {Fault::io_error, Fault::no_space, Fault::short_transfer, Fault::flipped_bit}) {
    engine.inject({.fault = fault, .probability = 0.05});
  }
  NvmeStore store({folder_}, capacity_for(kExtents), kExtent);
  StoreIo io(engine);
  const std::vector<ExtentId> extents = store.reserve(kExtents);
  std::map<ExtentId, std::uint64_t> written;  // the seed of what is there; none if never written
  std::mt19937_64 random(kSeed);
  int errors = 0, corrupt = 0, served = 0;
  for (std::uint64_t step = 1; step < 1000; ++step) {
    SCOPED_TRACE("seed " + std::to_string(kSeed) + " step " + std::to_string(step));
    const ExtentId extent = extents[random() % kExtents];
    try {
      if (random() % 2 == 0) {
        written.erase(extent);
        io.write(store, extent, pattern(kExtent - step, step));
        written[extent] = step;
      } else if (const auto found = written.find(extent); found == written.end()) {
        EXPECT_THROW(io.read(store, extent, kExtent), LogicError);
      } else {
        const std::uint64_t seed = found->second;
        EXPECT_EQ(io.read(store, extent, kExtent - seed), pattern(kExtent - seed, seed));
        ++served;
      }
    } catch (const IoError&) {
      ++errors;
    } catch (const CorruptData&) {
      ++corrupt;
    }
  }
  EXPECT_GT(errors, 50);
  EXPECT_GT(corrupt, 10);
  EXPECT_GT(served, 100);
  EXPECT_NO_THROW(store.release(extents)) << "something still counts as being under way";
}

TEST_F(NvmeStoreTest, writes_whose_record_fails_are_errors_of_their_own_and_count_as_never_written) {
  NvmeStore store({folder_ / "a", folder_ / "b"}, 2 * extent_file_bytes(kExtent, 4), kExtent);
  const std::vector<ExtentId> extents = store.reserve(8);
  AlignedBytes block = pattern(kExtent, 1);
  std::vector<NvmeStore::EndOfWrite> ends;
  for (const ExtentId extent : extents) {
    if (number(extent) == 2) continue;  // so that those on the first path are no neighbours
    ends.push_back({.extent = extent, .error = io_.run(store.begin_write(extent, block.data(), kExtent))});
  }
  {
    const FileSizeLimit limit(records_offset(kExtent, 4) + 2 * ExtentRecord::kBytes);
    store.end_writes(ends);
  }
  for (const NvmeStore::EndOfWrite& end : ends) {
    const ExtentId extent = end.extent;
    const std::exception_ptr& error = end.error;
    if (number(extent) < 4) {  // its record lies below the limit, whoever its neighbours are
      EXPECT_EQ(error, nullptr) << number(extent);
      EXPECT_EQ(read_back(store, extent), block);
    } else {
      const std::string message = message_of<IoError>([&] { std::rethrow_exception(error); });
      EXPECT_CONTAINS(message, "nvme: writing the record of extent " + std::to_string(number(extent)) + " (" +
                                   store.describe(extent) + ") failed: nvme: write of 64 B at offset ");
      EXPECT_CONTAINS(message, "File too large (EFBIG)\n  hint: ");
      EXPECT_THROW(read_back(store, extent), LogicError);
      write(store, extent, block);
      EXPECT_EQ(read_back(store, extent), block);
    }
  }
  EXPECT_NO_THROW(store.release(extents));
}

TEST_F(NvmeStoreTest, records_that_cannot_be_cleared_are_named_and_keep_no_others_from_it) {
  NvmeStore store({folder_ / "a", folder_ / "b"}, 2 * extent_file_bytes(kExtent, 4), kExtent);
  const std::vector<ExtentId> extents = store.reserve(8);
  for (const ExtentId extent : extents) write(store, extent, pattern(kExtent, 1));
  testing::internal::CaptureStderr();
  {
    const FileSizeLimit limit(records_offset(kExtent, 4) + ExtentRecord::kBytes);
    store.release(std::vector{ExtentId{2}, ExtentId{4}, ExtentId{7}});
  }
  const std::string logged = testing::internal::GetCapturedStderr();
  EXPECT_CONTAINS(logged, "nvme: clearing the record of 2 extents from 2 (" + store.describe(ExtentId{2}) +
                              ") on failed: nvme: write of 128 B");
  EXPECT_CONTAINS(logged, "nvme: clearing the record of extent 7 (" + store.describe(ExtentId{7}) + ") failed: ");
  EXPECT_EQ(store.free_extents(), 3U);
}

}  // namespace
}  // namespace terrace
