/// Transfers that begin or end several at a time: each has an error of its own, and leaves those beside it alone.
#include <exception>
#include <new>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/nvme_store.h"
#include "tests/offload/aligned_bytes.h"
#include "tests/offload/error_is.h"
#include "tests/offload/failing_allocation.h"
#include "tests/offload/nvme_store_fixture.h"

namespace terrace {
namespace {

class NvmeStoreBatchTest : public NvmeStoreTest {
 protected:
  NvmeStore store_{{folder_}, capacity_for(8), kExtent};
  const std::vector<ExtentId> extents_ = store_.reserve(5);
};

TEST_F(NvmeStoreBatchTest, writes_that_cannot_begin_keep_none_beside_them_from_it) {
  AlignedBytes first = pattern(kExtent, 1), second = pattern(100, 2), other(2 * kExtent);
  second.resize(kExtent);
  std::vector<NvmeStore::Beginning> writes = {
      {extents_[0], first.data(), kExtent}, {extents_[1], other.data() + 512, 100},
      {extents_[1], other.data(), 0},       {extents_[1], other.data(), kExtent + 1},
      {ExtentId{8}, other.data(), 100},     {ExtentId{7}, other.data(), 100},  // not reserved
      {extents_[0], other.data(), kExtent}, {extents_[2], second.data(), 100}};
  store_.begin_writes(writes);
  std::vector<NvmeStore::EndOfWrite> ends;
  for (const NvmeStore::Beginning& write : writes) {
    if (&write != &writes.front() && &write != &writes.back()) {
      EXPECT_TRUE(is<LogicError>(write.error)) << &write - writes.data();
      continue;
    }
    ASSERT_EQ(write.error, nullptr);
    ends.push_back({.extent = write.extent, .error = io_.run(write.operation)});
  }
  store_.end_writes(ends);
  EXPECT_EQ(read_back(store_, extents_[0]), pattern(kExtent, 1));
  EXPECT_EQ(read_back(store_, extents_[2], 100), pattern(100, 2));
  EXPECT_NO_THROW(store_.release(extents_)) << "what did not begin counts as under way";
}

TEST_F(NvmeStoreBatchTest, reads_that_cannot_begin_keep_none_beside_them_from_it) {
  write(store_, extents_[0], pattern(kExtent, 1));
  AlignedBytes first(kExtent), again(kExtent), other(2 * kExtent);
  std::vector<NvmeStore::Beginning> reads = {
      {extents_[0], first.data(), kExtent},       {extents_[0], other.data(), 100},
      {extents_[1], other.data(), kExtent},       {ExtentId{8}, other.data(), kExtent},
      {extents_[0], other.data() + 512, kExtent}, {extents_[0], again.data(), kExtent}};
  store_.begin_reads(reads);
  std::vector<NvmeStore::EndOfRead> ends;
  for (const NvmeStore::Beginning& read : reads) {
    if (&read != &reads.front() && &read != &reads.back()) {
      EXPECT_TRUE(is<LogicError>(read.error)) << &read - reads.data();
      continue;
    }
    ASSERT_EQ(read.error, nullptr);
    ends.push_back({.extent = read.extent, .block = read.block, .error = io_.run(read.operation)});
  }
  store_.end_reads(ends);
  for (const NvmeStore::EndOfRead& end : ends) EXPECT_EQ(end.error, nullptr);
  EXPECT_EQ(first, pattern(kExtent, 1));
  EXPECT_EQ(again, first);
  EXPECT_NO_THROW(store_.release(extents_)) << "what did not begin counts as under way";
}

TEST_F(NvmeStoreBatchTest, reads_end_each_with_its_own_error) {
  AlignedBytes block(kExtent);
  const AlignedBytes whole = pattern(kExtent, 1), wrong = pattern(kExtent, 2);
  for (const std::size_t i : {0, 1, 2}) {
    write(store_, extents_[i], whole);
    store_.begin_read(extents_[i], block.data(), kExtent);
  }
  const std::exception_ptr failed = std::make_exception_ptr(IoError("nvme: a drive's own"));
  std::vector<NvmeStore::EndOfRead> ends = {{ExtentId{8}, whole.data()},         {extents_[0], whole.data()},
                                            {extents_[3], whole.data()},         {extents_[1], wrong.data()},
                                            {extents_[2], whole.data(), failed}, {extents_[0], whole.data()}};
  store_.end_reads(ends);
  EXPECT_TRUE(is<LogicError>(ends[0].error)) << "out of range";
  EXPECT_EQ(ends[1].error, nullptr);
  EXPECT_TRUE(is<LogicError>(ends[2].error)) << "none is under way";
  EXPECT_TRUE(is<CorruptData>(ends[3].error));
  EXPECT_EQ(ends[4].error, failed);
  EXPECT_TRUE(is<LogicError>(ends[5].error)) << "one was under way, not two";
  EXPECT_NO_THROW(store_.release(extents_));
}

TEST_F(NvmeStoreBatchTest, a_write_that_ends_twice_at_once_has_ended_once) {
  AlignedBytes block = pattern(kExtent, 1);
  EXPECT_EQ(io_.run(store_.begin_write(extents_[0], block.data(), kExtent)), nullptr);
  std::vector<NvmeStore::EndOfWrite> ends = {{extents_[0]}, {extents_[0]}};
  store_.end_writes(ends);
  EXPECT_EQ(ends[0].error, nullptr);
  EXPECT_TRUE(is<LogicError>(ends[1].error));
  EXPECT_EQ(read_back(store_, extents_[0]), block);
  EXPECT_NO_THROW(store_.release(extents_));
}

TEST_F(NvmeStoreBatchTest, where_memory_runs_out_all_ends_and_nothing_stays_under_way) {
  if (!FailingAllocation::possible()) GTEST_SKIP() << "a sanitizer allocates";
  AlignedBytes block = pattern(kExtent, 1);
  const AlignedBytes wrong = pattern(kExtent, 2);
  for (int others_before = 0; others_before < 12; ++others_before) {
    for (const std::size_t i : {0, 1, 2}) {
      EXPECT_EQ(io_.run(store_.begin_write(extents_[i], block.data(), kExtent)), nullptr);
    }
    std::vector<NvmeStore::EndOfWrite> writes = {{extents_[0]}, {extents_[1]}, {extents_[2]}};
    {
      const FailingAllocation failing(others_before);
      store_.end_writes(writes);
    }
    for (const std::size_t i : {0, 1, 2}) {
      if (writes[i].error) write(store_, extents_[i], block);
      store_.begin_read(extents_[i], block.data(), kExtent);
    }
    std::vector<NvmeStore::EndOfRead> reads = {{extents_[0], wrong.data()},
                                               {extents_[1], block.data()},
                                               {extents_[3], block.data()},
                                               {extents_[2], wrong.data()}};
    {
      const FailingAllocation failing(others_before);
      store_.end_reads(reads);
    }
    EXPECT_EQ(reads[1].error, nullptr) << "it needs no memory";
    for (const std::size_t i : {0, 2, 3}) EXPECT_NE(reads[i].error, nullptr);
    EXPECT_NO_THROW(store_.release(extents_)) << "after " << others_before << " allocations";
    ASSERT_EQ(store_.reserve(5), extents_);
  }
}

TEST_F(NvmeStoreBatchTest, where_memory_runs_out_extents_are_taken_and_given_back_all_or_none) {
  if (!FailingAllocation::possible()) GTEST_SKIP() << "a sanitizer allocates";
  store_.release(std::vector{extents_[1], extents_[3]});  // so that what is free lies in several runs
  const std::vector<ExtentId> held = {extents_[0], extents_[2], extents_[4]};
  const std::uint64_t free = store_.free_extents();
  for (int others_before = 0; others_before < 12; ++others_before) {
    SCOPED_TRACE(others_before);
    for (const ExtentId extent : held) write(store_, extent, pattern(kExtent, 1));
    std::vector<ExtentId> more;
    try {
      const FailingAllocation failing(others_before);
      more = store_.reserve(5);
    } catch (const std::bad_alloc&) {
      EXPECT_EQ(store_.free_extents(), free);
      more = store_.reserve(5);
    }
    for (const ExtentId extent : more) write(store_, extent, pattern(kExtent, 2));
    try {
      const FailingAllocation failing(others_before);
      store_.release(more);
    } catch (const std::bad_alloc&) {
      EXPECT_EQ(store_.free_extents(), free - 5);
      store_.release(more);
    }
    EXPECT_EQ(store_.free_extents(), free);
    for (const ExtentId extent : held) EXPECT_EQ(read_back(store_, extent), pattern(kExtent, 1));
  }
}

}  // namespace
}  // namespace terrace
