#include "offload/nvme_store.h"

#include <algorithm>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/offload/aligned_bytes.h"
#include "tests/offload/nvme_store_fixture.h"
#include "tests/offload/store_io.h"

namespace terrace {
namespace {

// ---- Bytes

TEST_F(NvmeStoreTest, reads_back_what_was_written_last) {
  NvmeStore store({folder_}, capacity_for(8), kExtent);
  const std::vector<ExtentId> extents = store.reserve(3);
  for (std::uint64_t round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < 3; ++i) write(store, extents[i], pattern(kExtent - round * i, 10 * round + i));
    for (std::size_t i = 0; i < 3; ++i) {
      const std::size_t size = kExtent - round * i;
      EXPECT_EQ(read_back(store, extents[i], size), pattern(size, 10 * round + i));
    }
  }
}

TEST_F(NvmeStoreTest, what_was_never_written_cannot_be_read) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const std::vector<ExtentId> extents = store.reserve(1);
  EXPECT_THROW(read_back(store, extents[0]), LogicError);
  write(store, extents[0], pattern(kExtent, 1));
  store.release(extents);
  EXPECT_THROW(read_back(store, extents[0]), LogicError);
  EXPECT_EQ(store.reserve(1), extents);
  EXPECT_THROW(read_back(store, extents[0]), LogicError) << "the bytes of its former holder are not its own";
}

TEST_F(NvmeStoreTest, lengths_that_cannot_be_verified_are_refused) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const ExtentId extent = store.reserve(1).front();
  EXPECT_THROW(write(store, extent, pattern(kExtent + 1, 1)), LogicError);
  EXPECT_THROW(write(store, extent, {}), LogicError);
  write(store, extent, pattern(100, 1));
  EXPECT_THROW(read_back(store, extent, 99), LogicError);
  EXPECT_THROW(read_back(store, extent, kExtent), LogicError);
  EXPECT_EQ(read_back(store, extent, 100), pattern(100, 1));
}

// ---- Operations

TEST_F(NvmeStoreTest, moves_whole_units_and_writes_zeros_after_the_bytes) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const ExtentId extent = store.reserve(3)[2];
  AlignedBytes block(kExtent, std::byte{0xee});
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4095}, std::size_t{4096}, std::size_t{4097}, kExtent}) {
    const std::size_t units = bytes <= 4096 ? 4096 : kExtent;
    std::fill(block.begin(), block.end(), std::byte{0xee});
    for (const bool writes : {true, false}) {
      const IoOperation operation =
          writes ? store.begin_write(extent, block.data(), bytes) : store.begin_read(extent, block.data(), bytes);
      EXPECT_EQ(operation.direction, writes ? IoOperation::Direction::write : IoOperation::Direction::read);
      EXPECT_EQ(operation.file->path, store.files().front());
      EXPECT_EQ(operation.offset, 4096 + 2 * kExtent);
      EXPECT_EQ(operation.memory, block.data());
      EXPECT_EQ(operation.bytes, units);
      EXPECT_EQ(operation.owner, nullptr);
      EXPECT_EQ(io_.run(operation), nullptr);
      if (writes) {
        store.end_write(extent, true);
        for (std::size_t i = 0; i < kExtent; ++i) {
          ASSERT_EQ(block[i], i < bytes || i >= units ? std::byte{0xee} : std::byte{0}) << i << " of " << bytes;
        }
      } else {
        store.end_read(extent, block.data(), nullptr);
      }
    }
  }
}

TEST_F(NvmeStoreTest, memory_that_direct_transfers_cannot_use_is_refused) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const ExtentId extent = store.reserve(1).front();
  write(store, extent, pattern(100, 1));
  AlignedBytes block(2 * kExtent);
  EXPECT_THROW(store.begin_write(extent, block.data() + 512, 100), LogicError);
  EXPECT_THROW(store.begin_read(extent, block.data() + 512, 100), LogicError);
  EXPECT_EQ(read_back(store, extent, 100), pattern(100, 1)) << "a refused write changed something";
}

TEST_F(NvmeStoreTest, an_end_without_a_beginning_is_refused) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const ExtentId extent = store.reserve(1).front(), out_of_range{4};
  AlignedBytes block(kExtent);
  EXPECT_THROW(store.end_write(extent, true), LogicError);
  EXPECT_THROW(store.end_read(extent, block.data(), nullptr), LogicError);
  EXPECT_THROW(store.end_write(out_of_range, true), LogicError);
  EXPECT_THROW(store.end_read(out_of_range, block.data(), nullptr), LogicError);
  write(store, extent, pattern(kExtent, 1));
  EXPECT_THROW(store.end_write(extent, true), LogicError);
  store.begin_read(extent, block.data(), kExtent);
  store.end_read(extent, pattern(kExtent, 1).data(), nullptr);
  EXPECT_THROW(store.end_read(extent, block.data(), nullptr), LogicError);
}

TEST_F(NvmeStoreTest, an_end_without_a_beginning_leaves_those_beside_it_alone) {
  NvmeStore store({folder_}, capacity_for(8), kExtent);
  const std::vector<ExtentId> extents = store.reserve(3);
  AlignedBytes block = pattern(kExtent, 1);
  for (const ExtentId extent : {extents[0], extents[2]}) {
    EXPECT_EQ(io_.run(store.begin_write(extent, block.data(), kExtent)), nullptr);
  }
  std::vector<NvmeStore::EndOfWrite> ends = {{ExtentId{8}}, {extents[0]}, {extents[1]}, {extents[2]}};
  store.end_writes(ends);
  for (const std::size_t bad : {0, 2}) EXPECT_THROW(std::rethrow_exception(ends[bad].error), LogicError);
  for (const std::size_t good : {1, 3}) {
    EXPECT_EQ(ends[good].error, nullptr);
    EXPECT_EQ(read_back(store, ends[good].extent), block);
  }
  EXPECT_THROW(read_back(store, extents[1]), LogicError) << "nothing was written there";
  EXPECT_THROW(store.end_write(extents[1], false), LogicError);
  EXPECT_NO_THROW(store.release(extents));
}

TEST_F(NvmeStoreTest, says_whether_it_goes_past_the_page_cache) {
  const NvmeStore store({folder_}, capacity_for(4), kExtent);
  EXPECT_EQ(store.direct(), ExtentFile(folder_, kExtent, 1).direct());
}

TEST_F(NvmeStoreTest, a_transfer_in_flight_guards_its_own_extent_and_no_other) {
  NvmeStore store({folder_}, capacity_for(8), kExtent);
  const std::vector<ExtentId> extents = store.reserve(2);
  AlignedBytes block = pattern(kExtent, 1), other(kExtent);
  for (const bool writes : {true, false}) {
    const IoOperation operation = writes ? store.begin_write(extents[0], block.data(), kExtent)
                                         : store.begin_read(extents[0], block.data(), kExtent);
    write(store, extents[1], pattern(kExtent, 2));
    EXPECT_EQ(read_back(store, extents[1]), pattern(kExtent, 2));
    store.release(store.reserve(3));
    EXPECT_THROW(store.begin_write(extents[0], other.data(), kExtent), LogicError);
    EXPECT_THROW(store.retire(extents[0]), LogicError);
    EXPECT_THROW(store.release(extents), LogicError);
    if (writes) {
      EXPECT_THROW(store.begin_read(extents[0], other.data(), kExtent), LogicError);
    } else {
      EXPECT_EQ(read_back(store, extents[0]), pattern(kExtent, 1)) << "reads do not exclude each other";
    }
    EXPECT_EQ(io_.run(operation), nullptr);
    if (writes) {
      store.end_write(extents[0], true);
    } else {
      store.end_read(extents[0], block.data(), nullptr);
    }
  }
  EXPECT_EQ(read_back(store, extents[0]), pattern(kExtent, 1));
  EXPECT_NO_THROW(store.release(extents));
}

// ---- Threads

TEST_F(NvmeStoreTest, threads_write_and_read_different_extents_at_once) {
  NvmeStore store({folder_ / "a", folder_ / "b"}, capacity_for(36, 2), kExtent);
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      StoreIo io(engine_);
      const auto bytes_of = [&](ExtentId extent, std::uint64_t round) {
        return pattern(kExtent, number(extent) * 1000 + t * 100 + round);
      };
      for (std::uint64_t round = 0; round < 40; ++round) {
        const std::vector<ExtentId> extents = store.reserve(1 + round % 8);
        for (ExtentId extent : extents) io.write(store, extent, bytes_of(extent, round));
        for (ExtentId extent : extents) EXPECT_EQ(io.read(store, extent, kExtent), bytes_of(extent, round));
        if (round == 30 && t == 0) {
          store.retire(extents[0]);
          store.release(std::span(extents).subspan(1));
        } else {
          store.release(extents);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store.used_bytes(), 0U);
  EXPECT_EQ(store.free_extents(), 35U);
}

TEST_F(NvmeStoreTest, one_extent_is_read_by_many_threads_at_once) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const ExtentId extent = store.reserve(1).front();
  write(store, extent, pattern(kExtent, 1));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      StoreIo io(engine_);
      for (int round = 0; round < 50; ++round) EXPECT_EQ(io.read(store, extent, kExtent), pattern(kExtent, 1));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace terrace
