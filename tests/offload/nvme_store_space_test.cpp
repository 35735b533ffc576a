// What an NVMe store holds of a disk: extents, files, folders, and what there is room for.

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/units.h"
#include "offload/nvme_paths.h"
#include "offload/nvme_store.h"
#include "tests/offload/aligned_bytes.h"
#include "tests/offload/nvme_store_fixture.h"
#include "tests/offload/open_file.h"
#include "tests/offload/small_disk.h"
#include "tests/offload/store_io.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

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
