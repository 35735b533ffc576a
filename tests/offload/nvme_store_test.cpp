#include "offload/nvme_store.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/units.h"
#include "offload/choose_engine.h"
#include "offload/nvme_paths.h"
#include "tests/offload/aligned_bytes.h"
#include "tests/offload/fault_injecting_engine.h"
#include "tests/offload/open_file.h"
#include "tests/offload/small_disk.h"
#include "tests/offload/store_io.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kExtent = 8192;

class NvmeStoreTest : public testing::Test {
 protected:
  NvmeStoreTest() : name_((fs::temp_directory_path() / "terrace-test-XXXXXX").string()) {
    EXPECT_NE(::mkdtemp(name_.data()), nullptr);
    folder_ = name_;
  }
  ~NvmeStoreTest() override { fs::remove_all(folder_); }

  static std::uint64_t capacity_for(std::uint64_t extents, std::size_t paths = 1) {
    return paths * extent_file_bytes(kExtent, extents / paths);
  }

  std::string name_;
  fs::path folder_;
  AlignedBytes read_back(NvmeStore& store, ExtentId extent, std::size_t size = kExtent) {
    return io_.read(store, extent, size);
  }
  void write(NvmeStore& store, ExtentId extent, std::span<const std::byte> bytes) { io_.write(store, extent, bytes); }

  FaultInjectingEngine engine_{make_io_engine("auto")};
  StoreIo io_{engine_};
};

AlignedBytes pattern(std::size_t size, std::uint64_t seed) { return random_bytes(size, seed); }

std::uint64_t number(ExtentId extent) { return static_cast<std::uint64_t>(extent); }

template <typename Exception, typename Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const Exception& error) {
    return error.what();
  }
  return "nothing of that type was thrown";
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

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

// ---- Space

TEST_F(NvmeStoreTest, hands_out_contiguous_extents_while_there_is_such_a_run) {
  NvmeStore store({folder_}, capacity_for(10), kExtent);
  const std::vector<ExtentId> a = store.reserve(3), b = store.reserve(4), c = store.reserve(3);
  EXPECT_THROW(store.reserve(1), OutOfMemory);
  store.release(a);
  store.release(c);
  const std::vector<ExtentId> scattered = store.reserve(5);  // no run of five: all the same, each once
  EXPECT_EQ(std::set<ExtentId>(scattered.begin(), scattered.end()).size(), 5U);
  store.release(scattered);
  store.release(b);
  const std::vector<ExtentId> whole = store.reserve(10);  // released in pieces, joined again
  for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(number(whole[i]), i);
}

TEST_F(NvmeStoreTest, never_holds_an_extent_twice_and_counts_what_it_holds) {
  constexpr std::uint64_t kSeed = 20240817, kExtents = 64;
  NvmeStore store({folder_ / "a", folder_ / "b"}, capacity_for(kExtents, 2), kExtent);
  std::mt19937_64 random(kSeed);
  std::vector<ExtentId> held;
  std::set<ExtentId> unique;
  std::uint64_t retired = 0;
  for (int step = 0; step < 3000; ++step) {
    const std::size_t count = random() % 9;
    if (random() % 2 == 0) {
      if (count > kExtents - retired - held.size()) {
        EXPECT_THROW(store.reserve(count), OutOfMemory);
        continue;
      }
      for (ExtentId extent : store.reserve(count)) {
        ASSERT_TRUE(unique.insert(extent).second) << "seed " << kSeed << " step " << step;
        held.push_back(extent);
      }
    } else {
      std::shuffle(held.begin(), held.end(), random);
      const std::size_t released = std::min(count, held.size());
      const std::vector<ExtentId> gone(held.end() - static_cast<std::ptrdiff_t>(released), held.end());
      held.resize(held.size() - released);
      if (released > 0 && retired < 8 && random() % 100 == 0) {
        store.retire(gone[0]);  // stays in `unique`: it must never come again
        ++retired;
        store.release(std::span(gone).subspan(1));
      } else {
        store.release(gone);
        if (!gone.empty()) unique.erase(gone[0]);
      }
      for (std::size_t i = 1; i < gone.size(); ++i) unique.erase(gone[i]);
    }
    ASSERT_EQ(store.used_bytes(), held.size() * kExtent);
    ASSERT_EQ(store.free_extents(), kExtents - retired - held.size());
  }
  EXPECT_GT(retired, 0U);
}

TEST_F(NvmeStoreTest, says_who_is_full_and_what_to_raise) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const std::vector<ExtentId> extents = store.reserve(3);
  store.retire(extents[0]);
  const std::string message = message_of<OutOfMemory>([&] { store.reserve(2); });
  EXPECT_CONTAINS(message, "nvme: 2 extents of ");
  EXPECT_CONTAINS(message, "of 4, 2 are in use and 1 are bad");
  EXPECT_CONTAINS(message, "raise nvme.memory");
  EXPECT_EQ(store.reserve(1).size(), 1U) << "the refusal took something";
}

TEST_F(NvmeStoreTest, a_retired_extent_never_comes_again) {
  NvmeStore store({folder_}, capacity_for(3), kExtent);
  const std::vector<ExtentId> extents = store.reserve(2);
  write(store, extents[0], pattern(kExtent, 1));
  store.retire(extents[0]);
  EXPECT_THROW(read_back(store, extents[0]), LogicError);
  EXPECT_THROW(write(store, extents[0], pattern(kExtent, 1)), LogicError);
  EXPECT_THROW(store.retire(extents[0]), LogicError);
  EXPECT_THROW(store.release(extents), LogicError);
  EXPECT_EQ(store.used_bytes(), kExtent) << "nothing was released";
  store.release(std::span(extents).subspan(1));
  for (ExtentId extent : store.reserve(2)) EXPECT_NE(extent, extents[0]);
  EXPECT_THROW(store.reserve(1), OutOfMemory);
  EXPECT_EQ(store.retired_extents(), 1U);
}

TEST_F(NvmeStoreTest, illegal_uses_throw_and_change_nothing) {
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  const std::vector<ExtentId> extents = store.reserve(2);
  const ExtentId never_reserved{3}, out_of_range{4};
  EXPECT_THROW(store.release(std::vector{extents[0], never_reserved}), LogicError);
  EXPECT_THROW(store.release(std::vector{extents[0], out_of_range}), LogicError);
  EXPECT_THROW(store.release(std::vector{extents[0], extents[1], extents[0]}), LogicError);
  EXPECT_THROW(write(store, never_reserved, pattern(10, 1)), LogicError);
  EXPECT_THROW(write(store, out_of_range, pattern(10, 1)), LogicError);
  EXPECT_THROW(store.retire(never_reserved), LogicError);
  EXPECT_EQ(store.used_bytes(), 2 * kExtent);
  store.release(extents);
  EXPECT_THROW(store.release(extents), LogicError);
  EXPECT_TRUE(store.reserve(0).empty());
}

TEST_F(NvmeStoreTest, files_never_exceed_the_capacity) {
  for (const std::uint64_t capacity : {capacity_for(10, 3), capacity_for(10, 3) + 12345, capacity_for(3, 3)}) {
    NvmeStore store({folder_ / "a", folder_ / "b", folder_ / "c"}, capacity, kExtent);
    for (ExtentId extent : store.reserve(store.free_extents())) write(store, extent, pattern(kExtent, 1));
    std::uint64_t total = 0;
    for (const fs::path& file : store.files()) {
      EXPECT_LE(fs::file_size(file), capacity / 3);
      total += fs::file_size(file);
    }
    EXPECT_LE(total, store.capacity_bytes());
    EXPECT_EQ(store.capacity_bytes(), capacity);
    EXPECT_GT(total + 3 * kExtent, capacity) << "room was left unused";
  }
}

TEST_F(NvmeStoreTest, neighbouring_extents_are_striped_over_all_paths) {
  NvmeStore store({folder_ / "a", folder_ / "b"}, capacity_for(8, 2), kExtent);
  std::set<fs::path> written;
  AlignedBytes block(kExtent);
  for (ExtentId extent : store.reserve(2)) {
    written.insert(store.begin_write(extent, block.data(), kExtent).file->path.parent_path());
    store.end_write(extent, false);
    write(store, extent, pattern(kExtent, number(extent)));
    EXPECT_EQ(read_back(store, extent), pattern(kExtent, number(extent)));
  }
  EXPECT_EQ(written, (std::set<fs::path>{folder_ / "a", folder_ / "b"}));
}

TEST_F(NvmeStoreTest, a_path_that_fails_is_passed_over_until_a_write_there_succeeds_again) {
  NvmeStore store({folder_ / "a", folder_ / "b", folder_ / "c"}, capacity_for(18, 3), kExtent);
  const auto path_of = [&](ExtentId extent) { return fs::path(store.describe(extent)).parent_path().filename(); };
  const std::vector<ExtentId> first = store.reserve(3);
  store.retire(first[1]);
  const std::vector<ExtentId> beside = store.reserve(8);
  EXPECT_EQ(std::count_if(beside.begin(), beside.end(), [&](ExtentId each) { return path_of(each) == "b"; }), 0);
  for (const char* other : {"a", "c"}) {
    EXPECT_EQ(std::count_if(beside.begin(), beside.end(), [&](ExtentId each) { return path_of(each) == other; }), 4);
  }
  const std::vector<ExtentId> rest = store.reserve(6);  // where there is no other room it is tried all the same
  EXPECT_EQ(std::count_if(rest.begin(), rest.end(), [&](ExtentId each) { return path_of(each) == "b"; }), 4);
  store.release(beside);
  for (const ExtentId each : rest) write(store, each, pattern(kExtent, 1));
  const std::vector<ExtentId> again = store.reserve(3);
  store.release(rest);
  store.release(again);
  const std::vector<ExtentId> all = store.reserve(15);
  EXPECT_EQ(std::count_if(all.begin(), all.end(), [&](ExtentId each) { return path_of(each) == "b"; }), 5);
  EXPECT_EQ(store.free_extents(), 0u);
}

TEST_F(NvmeStoreTest, sets_space_aside_when_an_extent_is_first_reserved_and_not_again) {
  NvmeStore store({folder_ / "a", folder_ / "b"}, capacity_for(8, 2), kExtent);
  const auto on_disk = [&] {
    std::vector<std::uint64_t> bytes;
    for (const fs::path& file : store.files()) {
      struct stat status {};
      EXPECT_EQ(::stat(file.c_str(), &status), 0);
      bytes.push_back(static_cast<std::uint64_t>(status.st_blocks) * 512);
    }
    return bytes;
  };
  const std::vector<std::uint64_t> before = on_disk();
  const std::vector<ExtentId> extents = store.reserve(6);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(on_disk()[i], before[i] + 3 * kExtent);
  store.release(extents);
  for (const fs::path& file : store.files()) fs::resize_file(file, 4096);
  EXPECT_EQ(store.reserve(6), extents);
  for (const fs::path& file : store.files()) EXPECT_EQ(fs::file_size(file), 4096U) << "it was asked for again";
}

TEST_F(NvmeStoreTest, a_full_disk_is_told_at_reservation_and_nothing_is_held_then) {
  constexpr std::uint64_t disk_bytes = std::uint64_t{1} << 20U;
  const auto holds = holds_on_small_disk(folder_, disk_bytes, [&] {
    NvmeStore store({folder_}, capacity_for(100), kExtent);
    const std::string others(disk_bytes / 2, 'x');
    std::ofstream(folder_ / "others") << others;
    const std::string message = message_of<IoError>([&] { store.reserve(100); });
    EXPECT_CONTAINS(message, "nvme: reservation of " + std::to_string(100 * kExtent) + " B");
    EXPECT_CONTAINS(message, store.files().front().string());
    EXPECT_CONTAINS(message, "(ENOSPC)");
    EXPECT_EQ(store.used_bytes(), 0U);
    StoreIo io(engine_);  // the ring of the parent is not for its children
    const std::vector<ExtentId> fit = store.reserve(8);
    for (ExtentId extent : fit) io.write(store, extent, pattern(kExtent, number(extent)));
    for (ExtentId extent : fit) EXPECT_EQ(io.read(store, extent, kExtent), pattern(kExtent, number(extent)));
    fs::remove(folder_ / "others");
    EXPECT_EQ(store.reserve(92).size(), 92U) << "after space was freed";
    return !HasFailure();
  });
  if (!holds) GTEST_SKIP() << "this system gives no mount";
  EXPECT_TRUE(*holds);
}

TEST_F(NvmeStoreTest, more_than_the_disk_holds_is_refused_at_the_start) {
  constexpr std::uint64_t disk_bytes = std::uint64_t{1} << 20U;
  const auto holds = holds_on_small_disk(folder_, disk_bytes, [&] {
    const std::string message = message_of<IoError>([&] { NvmeStore({folder_}, 2 * disk_bytes, kExtent); });
    EXPECT_CONTAINS(message, "nvme.memory (2MiB)");
    EXPECT_CONTAINS(message, folder_.string());
    EXPECT_TRUE(fs::is_empty(folder_));
    EXPECT_EQ(NvmeStore({folder_}, disk_bytes, kExtent).reserve(1).size(), 1U) << "all of it can be had";
    return !HasFailure();
  });
  if (!holds) GTEST_SKIP() << "this system gives no mount";
  EXPECT_TRUE(*holds);
}

TEST_F(NvmeStoreTest, files_larger_than_this_process_may_make_are_refused_at_the_start) {
  const FileSizeLimit limit(32 * kExtent);
  const std::string message = message_of<IoError>([&] { NvmeStore({folder_}, capacity_for(64), kExtent); });
  EXPECT_CONTAINS(message, folder_.string());
  EXPECT_CONTAINS(message, "exceeds the limit on the size of files, 256KiB");
  EXPECT_CONTAINS(message, "(ulimit -f)");
  EXPECT_TRUE(fs::is_empty(folder_));
  EXPECT_LE(default_nvme_capacity({folder_}), 32 * kExtent);
  EXPECT_GT(NvmeStore({folder_}, default_nvme_capacity({folder_}), kExtent).extent_count(), 20U);
}

// ---- Faults

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

TEST_F(NvmeStoreTest, writes_whose_record_fails_are_errors_of_their_own_and_count_as_never_written) {
  NvmeStore store({folder_ / "a", folder_ / "b"}, 2 * extent_file_bytes(kExtent, 4), kExtent);
  const std::vector<ExtentId> extents = store.reserve(8);
  AlignedBytes block = pattern(kExtent, 1);
  std::vector<NvmeStore::EndOfWrite> ends;
  for (const ExtentId extent : extents) {
    if (number(extent) == 2) continue;  // so that those on the first path are no neighbours
    ends.push_back({extent, io_.run(store.begin_write(extent, block.data(), kExtent))});
  }
  {
    const FileSizeLimit limit(records_offset(kExtent, 4) + 2 * ExtentRecord::kBytes);
    store.end_writes(ends);
  }
  for (const auto& [extent, error] : ends) {
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
  std::vector<NvmeStore::EndOfWrite> ends = {
      {ExtentId{8}, nullptr}, {extents[0], nullptr}, {extents[1], nullptr}, {extents[2], nullptr}};
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

// ---- Opening and closing

TEST_F(NvmeStoreTest, creates_its_folders_and_removes_its_files) {
  const fs::path deep = folder_ / "x" / "y";
  std::vector<fs::path> files;
  {
    NvmeStore store({deep, folder_, deep}, capacity_for(6, 3), kExtent);  // a path may be given twice
    files = store.files();
    ASSERT_EQ(files.size(), 3U);
    for (const fs::path& file : files) EXPECT_TRUE(fs::exists(file));
  }
  for (const fs::path& file : files) EXPECT_FALSE(fs::exists(file));
}

TEST_F(NvmeStoreTest, two_stores_share_a_folder_without_touching_each_other) {
  NvmeStore first({folder_}, capacity_for(4), kExtent);
  const ExtentId a = first.reserve(1).front();
  write(first, a, pattern(kExtent, 1));
  {
    NvmeStore second({folder_}, capacity_for(4), kExtent);
    EXPECT_TRUE(second.removed_files().empty());
    write(second, second.reserve(1).front(), pattern(kExtent, 2));
  }
  EXPECT_EQ(read_back(first, a), pattern(kExtent, 1));
}

TEST_F(NvmeStoreTest, what_a_killed_process_left_is_removed_and_its_space_used) {
  const pid_t child = ::fork();
  if (child == 0) {
    NvmeStore store({folder_}, capacity_for(512), kExtent);
    StoreIo io(engine_);  // the ring of the parent is not for its children
    for (ExtentId extent : store.reserve(512)) io.write(store, extent, pattern(kExtent, 1));
    ::raise(SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_GE(dead_extent_file_bytes(folder_), 512 * kExtent) << "the default capacity counts these as free";
  NvmeStore store({folder_}, capacity_for(4), kExtent);
  EXPECT_EQ(store.removed_files().size(), 1U);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

TEST_F(NvmeStoreTest, a_path_that_cannot_be_used_is_named_with_the_reason) {
  std::ofstream(folder_ / "file") << "x";
  struct Case {
    fs::path path;
    const char* reason;
  };
  for (const Case& bad : {Case{folder_ / "file", "(ENOTDIR)"}, Case{folder_ / "file" / "below", "(ENOTDIR)"},
                          Case{"/proc/terrace/below", "(ENOENT)"}, Case{"/proc", "("}, Case{"", "("}}) {
    const std::string message = message_of<IoError>([&] {
      NvmeStore({folder_ / "good", bad.path}, capacity_for(4, 2), kExtent);
    });
    EXPECT_CONTAINS(message, bad.path.string());
    EXPECT_CONTAINS(message, bad.reason);
    EXPECT_CONTAINS(message, "\n  hint: set nvme.paths to folders that can be written");
  }
  EXPECT_TRUE(fs::is_empty(folder_ / "good")) << "files of the good path were left behind";
}

TEST_F(NvmeStoreTest, more_than_the_free_space_is_refused_with_both_sizes) {
  const std::uint64_t free_bytes = fs::space(folder_).available;
  const std::string message = message_of<IoError>([&] { NvmeStore({folder_}, 2 * free_bytes + (1 << 30), kExtent); });
  EXPECT_CONTAINS(message, "nvme.memory (");
  EXPECT_CONTAINS(message, "are free");
  EXPECT_CONTAINS(message, "\n  hint: lower nvme.memory or free space");
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(NvmeStoreTest, paths_on_one_file_system_share_its_free_space) {
  const std::uint64_t free_bytes = fs::space(folder_).available;
  // Each path alone would have room for its half.
  EXPECT_THROW(NvmeStore({folder_ / "a", folder_ / "b"}, free_bytes / 4 * 5, kExtent), IoError);
}

TEST_F(NvmeStoreTest, the_default_capacity_fits_and_changes_nothing_on_disk) {
  const std::vector<fs::path> paths = {folder_ / "a", folder_ / "b"};
  const std::uint64_t capacity = default_nvme_capacity(paths);
  EXPECT_TRUE(fs::is_empty(folder_));
  EXPECT_GT(capacity, fs::space(folder_).available / 2);
  EXPECT_LT(capacity, fs::space(folder_).available);
  EXPECT_NO_THROW(NvmeStore(paths, capacity, std::size_t{1} << 20));
  EXPECT_EQ(default_nvme_capacity({}), 0U);
}

TEST_F(NvmeStoreTest, a_capacity_without_room_for_an_extent_is_refused_with_the_least_that_works) {
  const std::vector<fs::path> paths = {folder_ / "a", folder_ / "b"};
  const std::string message = message_of<OutOfMemory>([&] { NvmeStore(paths, capacity_for(2, 2) - 1, kExtent); });
  EXPECT_CONTAINS(message, "raise nvme.memory to at least " + format_bytes_exactly(capacity_for(2, 2)));
  EXPECT_EQ(NvmeStore(paths, capacity_for(2, 2), kExtent).extent_count(), 2U);
  EXPECT_THROW(NvmeStore({}, 1 << 20, kExtent), LogicError);
  EXPECT_THROW(NvmeStore({folder_}, 1 << 20, 5000), LogicError);
}

}  // namespace
}  // namespace terrace
