// What the access stream makes of a drive that fails: who hears of it, and what is not lost.

#include <array>
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "memory/access_stream.h"
#include "tests/memory/access_stream_fixture.h"
#include "tests/memory/stream_world.h"
#include "tests/offload/small_disk.h"

namespace terrace {
namespace {

using testing::HasSubstr;

TEST_F(AccessStreamTest, a_failed_read_reaches_who_asked_with_path_and_offset) {
  StreamWorld world(sizes(2, 2, 4));
  const ChunkId chunk = add(world, nvme);
  const ChunkId other = add(world, host);
  write_at(world, chunk, device, 1);
  write_at(world, other, host, 2);
  empty_device(world);
  world.engine.failing_reads = 2;
  for (const Tier tier : {device, host}) {
    const std::uint64_t before = world.stream.usage().now(tier);
    const std::vector<ChunkAccess> accesses{{other, host, read}, {chunk, tier, write}};
    const std::string text = thrown_text<IoError>([&] { world.stream.acquire(accesses); });
    EXPECT_THAT(text, HasSubstr("read of 16384 B at offset 4096 from " + world.store.files().front().string()));
    EXPECT_EQ(world.stream.usage().now(tier), before) << name_of(tier);
  }
  world.check_invariants();
  EXPECT_EQ(world.arena.used_bytes(), (TransferService::staging_blocks + 1) * granule);
  EXPECT_TRUE(reads_at(world, chunk, device, 1)) << "the drive is back";
  world.stream.allocate(2 * granule, Kind::other);  // no pin was left behind
  world.stream.free(2 * granule, Kind::other);
}

TEST_F(AccessStreamTest, a_write_that_fails_once_goes_to_another_place) {
  StreamWorld world(sizes(1, 2, 4));
  const ChunkId chunk = add(world, nvme);
  write_at(world, chunk, device, 1);
  world.engine.failing_writes = 1;
  empty_device(world);
  EXPECT_EQ(world.store.retired_extents(), 1u);
  EXPECT_TRUE(reads_at(world, chunk, device, 1));
  world.check_invariants();
}

constexpr std::uint64_t chunk_bytes = 64 * 1024;

TEST_F(AccessStreamTest, paths_that_are_lost_are_left_while_one_is_left) {
  for (const int lost : {1, 2, 3}) {
    StreamWorld several(
        {.device_bytes = 8 * chunk_bytes, .host_bytes = chunk_bytes, .nvme_extents = 36, .nvme_paths = 3});
    const ChunkId dirty = several.stream.add_chunk(Kind::parameter, 0, chunk_bytes, Tier::nvme);
    const ChunkId other = several.stream.add_chunk(Kind::parameter, 1, chunk_bytes, Tier::nvme);
    write_pattern(several.acquire(dirty, Tier::host, Access::write), 0, Tier::host, chunk_bytes, 7);
    several.engine.inject({.fault = Fault::io_error,
                           .direction = IoOperation::Direction::write,
                           .when = [&](const IoOperation& operation) {
                             const std::string path = operation.file->path.parent_path().filename().string();
                             return std::stoi(path) < lost;
                           }});
    if (lost < 3) {
      several.acquire(other, Tier::host);  // for which the first has to leave
      EXPECT_TRUE(holds_pattern(several.acquire(dirty, Tier::host), 0, Tier::host, chunk_bytes, 7));
    } else {
      try {
        several.acquire(other, Tier::host);
        ADD_FAILURE() << "no path takes it";
      } catch (const IoError& error) {
        EXPECT_NE(std::string(error.what()).find(several.folder.path().string()), std::string::npos) << error.what();
      }
      EXPECT_EQ(several.state(dirty, Tier::host), CopyState::valid) << "and nothing is lost";
    }
    several.check_invariants();
  }
}

TEST_F(AccessStreamTest, a_drive_without_space_for_a_chunk_is_told_when_it_is_made) {
  constexpr std::uint64_t disk_bytes = std::uint64_t{1} << 20U;
  TemporaryFolder disk;
  const auto holds = holds_on_small_disk(disk.path(), disk_bytes, [&] {
    NvmeStore small_store({disk.path()}, disk_bytes * 3 / 4, 16 * 1024);
    std::ofstream(disk.path() / "others") << std::string(disk_bytes / 2, 'x');
    EmulatedDevice small_device(1 << 20);
    HostArena arena(16 * 1024, TransferService::staging_blocks + 4);
    Budget on_host(Tier::host, arena.capacity_bytes());
    Budget on_nvme(Tier::nvme, small_store.extent_count() * small_store.extent_bytes());
    ThreadEngine engine;
    AccessStream stream({&small_device.budget(), &on_host, &on_nvme}, small_device, arena, &small_store, &engine, {});
    const ChunkId fits = stream.add_chunk(Kind::parameter, 0, 128 * 1024, Tier::nvme);
    EXPECT_THROW(stream.add_chunk(Kind::parameter, 1, 512 * 1024, Tier::nvme), IoError);
    EXPECT_EQ(on_nvme.used(), 128 * 1024u);
    EXPECT_EQ(small_store.used_bytes(), 128 * 1024u);
    const std::array access{ChunkAccess{fits, Tier::device, Access::write}};
    stream.acquire(access);
    return !HasFailure();
  });
  if (!holds) GTEST_SKIP() << "this system gives no mount";
  EXPECT_TRUE(*holds);
}

TEST_F(AccessStreamTest, after_a_drive_that_answers_no_more_every_request_is_refused_and_the_stream_ends) {
  StreamWorld lost({.device_bytes = 8 * chunk_bytes, .host_bytes = chunk_bytes, .nvme_extents = 36});
  const ChunkId first = lost.stream.add_chunk(Kind::parameter, 0, chunk_bytes, Tier::nvme);
  const ChunkId second = lost.stream.add_chunk(Kind::parameter, 1, chunk_bytes, Tier::nvme);
  const ChunkId there = lost.stream.add_chunk(Kind::parameter, 2, chunk_bytes, Tier::device);
  write_pattern(lost.acquire(first, Tier::host, Access::write), 0, Tier::host, chunk_bytes, 7);
  lost.acquire(second, Tier::host);
  lost.engine.inject({.fault = Fault::dead_queue});
  EXPECT_THROW(lost.acquire(first, Tier::host), Unanswered);
  EXPECT_THROW(lost.acquire(there, Tier::device), IoError);
  EXPECT_THROW(lost.stream.allocate(1 << 30, Kind::other), IoError);
}

TEST_F(AccessStreamTest, a_write_that_fails_in_the_middle_of_a_chunk_loses_no_extent_but_the_bad_one) {
  StreamWorld world(sizes(3, 3, 7));
  const ChunkId chunk = world.stream.add_chunk(Kind::parameter, 0, 3 * granule, nvme);
  {
    const Pin pin = world.acquire(chunk, device, write);
    write_pattern(pin, 0, device, 3 * granule, 1);
  }
  int writes = 0;
  world.engine.before_write = [&](std::uint64_t) { world.engine.failing_writes = ++writes == 2 ? 1 : 0; };
  empty_device(world);
  EXPECT_EQ(world.store.retired_extents(), 1u);
  EXPECT_EQ(world.store.used_bytes(), 3 * granule);
  const Pin pin = world.acquire(chunk, host);
  EXPECT_TRUE(holds_pattern(pin, 0, host, 3 * granule, 1));
}

TEST_F(AccessStreamTest, a_write_that_keeps_failing_stops_the_stream_and_loses_nothing) {
  StreamWorld world(sizes(1, 2, 4));
  const ChunkId chunk = add(world, nvme);
  write_at(world, chunk, device, 1);
  const ChunkId other = add(world, host);
  world.engine.failing_writes = 1000;
  const std::string text = thrown_text<IoError>([&] { world.acquire(other, device); });
  EXPECT_THAT(text, HasSubstr("write of 16384 B at offset"));
  EXPECT_THAT(text, HasSubstr(world.store.files().front().string()));
  world.engine.failing_writes = 0;
  EXPECT_EQ(thrown_text<IoError>([&] { world.acquire(other, host); }), text) << "from now on";
  EXPECT_EQ(world.state(chunk, device), CopyState::valid) << "dirty and resident";
  EXPECT_EQ(world.stream.usage().now(device), granule);
  world.check_invariants();
}

TEST_F(AccessStreamTest, where_no_other_place_is_left_the_cause_is_still_the_failed_write) {
  StreamWorld world(sizes(1, 2, 1));
  const ChunkId chunk = add(world, nvme);
  write_at(world, chunk, device, 1);
  world.engine.failing_writes = 1;
  const std::string text = thrown_text<IoError>([&] { empty_device(world); });
  EXPECT_THAT(text, HasSubstr("write of 16384 B at offset 4096"));
}

TEST_F(AccessStreamTest, a_byte_that_changed_on_disk_is_told) {
  StreamWorld world(sizes(2, 2, 4));
  const ChunkId chunk = add(world, nvme);
  const ChunkId other = add(world, nvme);
  write_at(world, chunk, device, 1);
  empty_device(world);
  write_at(world, other, device, 2);
  empty_device(world);
  {
    std::fstream file(world.store.files().front(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(4096 + 100);
    const char flipped = static_cast<char>(file.peek() ^ 1);
    file.seekp(4096 + 100);
    ASSERT_TRUE(file.put(flipped));
  }
  const std::uint64_t before = world.stream.usage().now(device);
  for (int attempt = 0; attempt < 3; ++attempt) {
    const std::string text = thrown_text<CorruptData>([&] { world.acquire(chunk, device); });
    EXPECT_THAT(text, HasSubstr("offset 4096 of " + world.store.files().front().string()));
  }
  EXPECT_EQ(world.stream.usage().now(device), before);
  EXPECT_TRUE(reads_at(world, other, device, 2)) << "the others are well";
  world.stream.discard(chunk);
  write_at(world, chunk, device, 3);
  empty_device(world);
  EXPECT_TRUE(reads_at(world, chunk, host, 3)) << "and so is what is written anew";
  world.check_invariants();
}

}  // namespace
}  // namespace terrace
