// Bytes that the program has made, and gives to a chunk with the memory that they lie in.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/memory/access_stream_fixture.h"
#include "tests/memory/stream_world.h"

namespace terrace {
namespace {

constexpr std::uint64_t bytes = 8 * granule;
constexpr std::uint64_t offset = 64;
const std::uint64_t room = PageBlocks::rounded(bytes + offset);

struct AdoptionWorld : StreamWorld {
  explicit AdoptionWorld(std::uint64_t device_bytes, std::size_t prefetch_depth = 0,
                         std::uint64_t device_chunk_limit = ~std::uint64_t{0}, std::uint64_t rest_bytes = 2 * bytes)
      : StreamWorld({.granule_bytes = granule,
                     .device_bytes = device_bytes,
                     .host_bytes = rest_bytes,
                     .nvme_extents = rest_bytes / granule,
                     .device_chunk_limit = device_chunk_limit,
                     .prefetch_depth = prefetch_depth}) {}

  ChunkId add(Tier home, std::optional<ChunkId> in_place_of = std::nullopt) {
    AccessStream::ChunkOptions options;
    options.in_place_of = in_place_of;
    options.device_room_bytes = room;
    return stream.add_chunk(Kind::activation, 0, bytes, home, options);
  }
  /// As the program does it: counted, then taken.
  Allocation made(std::uint64_t stamp) {
    stream.allocate(room, Kind::other);
    const Allocation allocation{device.allocate(bytes + offset), bytes + offset};
    const std::vector<std::byte> source = pattern(stamp, bytes);
    std::memcpy(allocation.memory + offset, source.data(), bytes);
    return allocation;
  }
  void adopt(ChunkId chunk, const Allocation& allocation) { stream.adopt(chunk, allocation, offset, Kind::other); }
  bool holds(ChunkId chunk, std::uint64_t stamp) {
    return holds_pattern(acquire(chunk, Tier::device), 0, Tier::device, bytes, stamp);
  }
  std::uint64_t used(Kind kind) { return device.budget().used(kind); }
};

class Adoption : public testing::TestWithParam<Tier> {};
INSTANTIATE_TEST_SUITE_P(Home, Adoption, testing::Values(host, nvme),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(Adoption, makes_the_memory_of_the_program_the_place_of_the_chunk) {
  AdoptionWorld world(room);  // no room for a copy
  const ChunkId chunk = world.add(GetParam());
  const Allocation allocation = world.made(1);
  ASSERT_NO_THROW(world.adopt(chunk, allocation));
  EXPECT_EQ(world.acquire(chunk, device).device(0), allocation.memory + offset);
  EXPECT_TRUE(world.holds(chunk, 1));
  EXPECT_EQ(world.used(Kind::other), 0u);
  EXPECT_EQ(world.used(Kind::activation), room);
  EXPECT_EQ(world.stream.usage().moved(Link::host_to_device), 0u);
  world.check_invariants();
}

TEST_P(Adoption, lets_the_bytes_leave_for_the_program_and_come_back) {
  AdoptionWorld world(room);
  const ChunkId chunk = world.add(GetParam());
  ASSERT_NO_THROW(world.adopt(chunk, world.made(1)));
  const Allocation other = world.made(2);
  EXPECT_EQ(world.state(chunk, device), CopyState::absent);
  world.device.deallocate(other.memory, other.bytes);
  world.stream.free(room, Kind::other);
  EXPECT_TRUE(world.holds(chunk, 1));
  world.check_invariants();
}

TEST_P(Adoption, is_not_followed_by_a_copy_where_nothing_had_to_leave) {
  AdoptionWorld world(room, 4);
  const ChunkId chunk = world.add(GetParam());
  ASSERT_NO_THROW(world.adopt(chunk, world.made(1)));
  EXPECT_EQ(world.state(chunk, GetParam()), CopyState::reserved);
  EXPECT_TRUE(world.holds(chunk, 1));
  world.stream.remove_chunk(chunk);
  ASSERT_EQ(world.add(GetParam(), chunk), chunk);
  ASSERT_NO_THROW(world.adopt(chunk, world.made(2)));
  EXPECT_EQ(world.state(chunk, GetParam()), CopyState::reserved);
  for (const Link link : all_links) {
    EXPECT_EQ(world.stream.usage().moved(link), 0u) << name_of(link);
  }
}

TEST_P(Adoption, is_followed_by_a_copy_to_the_home_at_once_where_the_one_before_had_to_leave) {
  AdoptionWorld world(room, 4);
  const ChunkId chunk = world.add(GetParam());
  ASSERT_NO_THROW(world.adopt(chunk, world.made(1)));
  const Allocation other = world.made(2);
  EXPECT_EQ(world.state(chunk, device), CopyState::absent);
  world.device.deallocate(other.memory, other.bytes);
  world.stream.free(room, Kind::other);
  world.stream.remove_chunk(chunk);
  ASSERT_EQ(world.add(GetParam(), chunk), chunk);
  ASSERT_NO_THROW(world.adopt(chunk, world.made(3)));
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (world.state(chunk, GetParam()) != CopyState::valid && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(world.state(chunk, GetParam()), CopyState::valid);
  EXPECT_EQ(world.state(chunk, device), CopyState::valid) << "nobody wants its room";
  EXPECT_TRUE(world.holds(chunk, 3));
}

TEST_P(Adoption, has_only_those_leave_in_later_passes_that_find_no_room) {
  constexpr std::size_t count = 4;
  AdoptionWorld world(3 * room, 4, ~std::uint64_t{0}, count * bytes);
  std::vector<ChunkId> chunks;
  std::uint64_t left_before = 0;
  for (int pass = 0; pass < 4; ++pass) {
    world.stream.begin_pass(1);
    for (std::size_t i = 0; i < count; ++i) {
      const Allocation allocation = world.made(i);
      const auto in_place_of = pass == 0 ? std::nullopt : std::optional(chunks[i]);
      const ChunkId chunk = world.add(GetParam(), in_place_of);
      ASSERT_EQ(chunk, in_place_of.value_or(chunk));
      chunks.resize(count);
      chunks[i] = chunk;
      ASSERT_NO_THROW(world.adopt(chunk, allocation));
    }
    for (std::size_t i = count; i-- > 0;) {
      EXPECT_TRUE(world.holds(chunks[i], i));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // what is brought ahead looks for room
      world.stream.remove_chunk(chunks[i]);
    }
    world.stream.step_mark();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (world.device.budget().used() > 0 && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const std::uint64_t left = world.stream.usage().moved(Link::device_to_host, Kind::activation);
    if (pass > 1) {
      EXPECT_EQ(left - left_before, bytes) << "in pass " << pass;
    }
    left_before = left;
    world.check_invariants();
  }
}

TEST_P(Adoption, leaves_nothing_counted_when_the_chunk_is_removed) {
  AdoptionWorld world(room, 4);
  const std::uint64_t on_host = world.host.used();
  const ChunkId chunk = world.add(GetParam());
  ASSERT_NO_THROW(world.adopt(chunk, world.made(1)));
  world.stream.remove_chunk(chunk);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (world.device.budget().used() + world.nvme.used() > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(world.device.budget().used(), 0u);
  EXPECT_EQ(world.nvme.used(), 0u);
  EXPECT_EQ(world.host.used(), on_host);
  world.check_invariants();
}

TEST(AdoptionOfMemory, takes_nothing_of_what_chunks_may_have_of_the_device) {
  AdoptionWorld world(2 * room, 0, room - 1);
  const ChunkId chunk = world.add(host);
  world.adopt(chunk, world.made(1));
  EXPECT_TRUE(world.holds(chunk, 1));
  world.check_invariants();
}

TEST(AdoptionOfMemory, is_refused_for_what_is_no_activation) {
  AdoptionWorld world(2 * room);
  AccessStream::ChunkOptions options;
  options.device_room_bytes = room;
  const ChunkId chunk = world.stream.add_chunk(Kind::parameter, 0, bytes, host, options);
  const Allocation allocation = world.made(1);
  EXPECT_THROW(world.adopt(chunk, allocation), LogicError);
  world.device.deallocate(allocation.memory, allocation.bytes);
  world.stream.free(room, Kind::other);
}

TEST(AdoptionOfMemory, is_refused_for_a_chunk_that_has_bytes) {
  AdoptionWorld world(2 * room);
  const ChunkId chunk = world.add(host);
  ASSERT_NO_THROW(world.adopt(chunk, world.made(1)));
  const Allocation second = world.made(2);
  EXPECT_THROW(world.adopt(chunk, second), LogicError);
  EXPECT_TRUE(world.holds(chunk, 1));
  world.device.deallocate(second.memory, second.bytes);
  world.stream.free(room, Kind::other);
}

TEST(AdoptionOfMemory, of_another_size_than_was_promised_is_refused) {
  AdoptionWorld world(2 * room);
  const ChunkId chunk = world.stream.add_chunk(Kind::activation, 0, bytes, host);
  const Allocation allocation = world.made(1);
  EXPECT_THROW(world.adopt(chunk, allocation), LogicError);
  EXPECT_EQ(world.used(Kind::other), room) << "it is the program's still";
  world.device.deallocate(allocation.memory, allocation.bytes);
  world.stream.free(room, Kind::other);
  world.check_invariants();
}

TEST(NewChunks, take_the_id_of_one_that_is_gone) {
  AdoptionWorld world(2 * room);
  const ChunkId first = world.add(host);
  ASSERT_NO_THROW(world.adopt(first, world.made(1)));
  world.stream.remove_chunk(first);
  EXPECT_EQ(world.add(host, first), first);
  ASSERT_NO_THROW(world.adopt(first, world.made(2)));
  EXPECT_TRUE(world.holds(first, 2));
  world.check_invariants();
}

TEST(NewChunks, take_another_id_while_something_is_left_of_that_one) {
  AdoptionWorld world(2 * room);
  const ChunkId first = world.add(host);
  ASSERT_NO_THROW(world.adopt(first, world.made(1)));
  Pin pin = world.acquire(first, device);
  world.stream.remove_chunk(first);
  const ChunkId second = world.add(host, first);
  EXPECT_NE(second, first);
  pin.release();
  EXPECT_THROW(world.acquire(first, device), LogicError);
  EXPECT_NO_THROW(world.adopt(second, world.made(2)));
  EXPECT_TRUE(world.holds(second, 2));
}

TEST(NewChunks, leave_the_id_free_where_there_is_no_room_to_rest) {
  AdoptionWorld world(2 * room);
  const ChunkId first = world.add(host);
  world.stream.remove_chunk(first);
  const ChunkId second = world.add(host);
  const ChunkId third = world.add(host);
  EXPECT_THROW(world.add(host, first), OutOfMemory);
  EXPECT_THROW(world.acquire(first, device), LogicError) << "it is still removed";
  world.stream.remove_chunk(second);
  EXPECT_EQ(world.add(host, first), first);
  world.stream.remove_chunk(third);
  world.check_invariants();
}

}  // namespace
}  // namespace terrace
