#include "memory/access_stream.h"

#include <chrono>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/emulated_computation.h"
#include "tests/memory/access_stream_fixture.h"
#include "tests/memory/stream_world.h"

namespace terrace {
namespace {

using testing::HasSubstr;

// ---- Contents

class AccessStreamSizes : public testing::TestWithParam<std::uint64_t> {};

TEST_P(AccessStreamSizes, contents_survive_eviction_through_all_tiers) {
  const std::uint64_t bytes = GetParam();
  const std::uint64_t granules = (bytes + granule - 1) / granule;
  StreamWorld world({.granule_bytes = granule,
                     .device_bytes = 2 * PageBlocks::rounded(bytes),
                     .host_bytes = 3 * granules * granule,
                     .nvme_extents = 6 * granules});
  std::vector<ChunkId> chunks;
  for (std::uint32_t i = 0; i < 6; ++i) {
    chunks.push_back(world.stream.add_chunk(Kind::parameter, i, bytes, i == 0 ? host : nvme));
  }
  std::vector<std::uint64_t> stamps(chunks.size(), 0);
  std::mt19937_64 random(bytes);
  for (std::uint64_t event = 1; event <= 300; ++event) {
    const std::size_t which = random() % chunks.size();
    const Tier tier = random() % 2 == 0 ? device : host;
    const Access mode = random() % 2 == 0 ? read : write;
    const Pin pin = world.acquire(chunks[which], tier, mode);
    ASSERT_TRUE(holds_pattern(pin, 0, tier, bytes, stamps[which])) << "event " << event;
    if (mode == write) {
      stamps[which] = event;
      write_pattern(pin, 0, tier, bytes, event);
    }
  }
  world.check_invariants();
  const MemoryUsage usage = world.stream.usage();
  for (const Link link : all_links) EXPECT_GT(usage.moved(link), 0u) << name_of(link);
  for (const Tier tier : all_tiers) EXPECT_LE(usage.peak(tier), usage.capacity(tier)) << name_of(tier);
}

INSTANTIATE_TEST_SUITE_P(ChunkBytes, AccessStreamSizes,
                         testing::Values(1, 4096, granule - 1, granule, granule + 1, 40'000, 4 * granule, 100'003));

TEST_F(AccessStreamTest, a_chunk_never_written_reads_as_zeros_on_every_tier) {
  StreamWorld world(sizes(2, 2, 2));
  const ChunkId dirty = add(world, nvme);
  for (const Tier tier : {device, host}) write_at(world, dirty, tier, 1);  // so that memory is not zero by chance
  world.stream.discard(dirty);
  const ChunkId fresh = add(world, nvme);
  EXPECT_TRUE(reads_at(world, fresh, device, 0));
  EXPECT_TRUE(reads_at(world, fresh, host, 0));
  EXPECT_EQ(world.stream.usage().moved(Link::host_to_device), 0u);
}

TEST_F(AccessStreamTest, several_operands_are_pinned_together_in_their_order) {
  StreamWorld world(sizes(3, 3, 3));
  const ChunkId first = add(world, host);
  const ChunkId second = add(world, host);
  write_at(world, first, host, 1);
  write_at(world, second, host, 2);
  const std::vector<ChunkAccess> accesses{{second, device, read}, {first, host, read}, {first, device, read}};
  const Pin pin = world.stream.acquire(accesses);
  EXPECT_TRUE(holds_pattern(pin, 0, device, granule, 2));
  EXPECT_TRUE(holds_pattern(pin, 1, host, granule, 1));
  EXPECT_TRUE(holds_pattern(pin, 2, device, granule, 1));
  EXPECT_NE(pin.device(0), pin.device(2));
}

TEST_F(AccessStreamTest, host_bytes_lead_through_the_granules_of_a_chunk) {
  StreamWorld world(sizes(2, 3, 1));
  const ChunkId chunk = world.stream.add_chunk(Kind::momentum, 0, 2 * granule + 100, host);
  const Pin pin = world.acquire(chunk, host, write);
  ASSERT_EQ(pin.host(0).size(), 3u);
  EXPECT_EQ(pin.host_bytes(0, 0).data(), pin.host(0)[0]);
  EXPECT_EQ(pin.host_bytes(0, 0).size(), granule);
  EXPECT_EQ(pin.host_bytes(0, granule + 64).data(), pin.host(0)[1] + 64);
  EXPECT_EQ(pin.host_bytes(0, granule + 64).size(), granule - 64);
  EXPECT_EQ(pin.host_bytes(0, 2 * granule).data(), pin.host(0)[2]);
}

TEST_F(AccessStreamTest, discarded_bytes_are_not_moved) {
  StreamWorld world(sizes(1, 1, 2));
  const ChunkId dead = add(world, nvme);
  const ChunkId other = add(world, nvme);
  write_at(world, dead, device, 1);
  world.stream.discard(dead);
  write_at(world, other, device, 2);
  EXPECT_EQ(world.stream.usage().moved(Link::device_to_host), 0u);
  write_at(world, dead, host, 3);
  EXPECT_TRUE(reads_at(world, dead, host, 3));
}

TEST_F(AccessStreamTest, cached_copies_make_room_for_a_chunk_that_comes_to_rest) {
  StreamWorld world(sizes(2, 2, 4));
  const ChunkId first = add(world, nvme);
  const ChunkId second = add(world, nvme);
  write_at(world, first, host, 1);
  write_at(world, second, host, 2);
  EXPECT_EQ(world.host.free(), 0u);
  add(world, host);
  world.check_invariants();
  EXPECT_TRUE(reads_at(world, first, device, 1));
  EXPECT_TRUE(reads_at(world, second, device, 2));
}

TEST_F(AccessStreamTest, a_chunk_comes_to_rest_on_the_device_in_the_room_of_copies_there) {
  StreamSizes small = sizes(8, 8, 4);
  small.device_chunk_limit = 2 * granule;
  StreamWorld world(small);
  const std::vector<ChunkId> guests{add(world, host), add(world, host)};
  for (const ChunkId guest : guests) write_at(world, guest, device, guest + 1);
  const ChunkId resident = add(world, device, Kind::momentum);
  write_at(world, resident, device, 9);
  EXPECT_THROW((add(world, device, Kind::momentum), add(world, device, Kind::momentum)), OutOfMemory);
  EXPECT_TRUE(reads_at(world, guests[0], host, 1));
  EXPECT_TRUE(reads_at(world, guests[1], host, 2));
  EXPECT_TRUE(reads_at(world, resident, device, 9));
  world.check_invariants();
}

// ---- Figures

TEST_F(AccessStreamTest, every_link_that_bytes_cross_counts_them_by_kind) {
  StreamWorld world(sizes(2, 1, 2));
  const ChunkId chunk = add(world, nvme, Kind::gradient);
  const ChunkId other = add(world, nvme, Kind::variance);
  const auto moved = [&] {
    std::vector<std::uint64_t> granules;
    for (const Link link : all_links) granules.push_back(world.stream.usage().moved(link, Kind::gradient) / granule);
    return granules;  // nvme to host, host to nvme, host to device, device to host
  };
  using Granules = std::vector<std::uint64_t>;
  write_at(world, chunk, device, 1);
  EXPECT_EQ(moved(), (Granules{0, 0, 0, 0})) << "a fill crosses no link";
  empty_device(world);
  EXPECT_EQ(moved(), (Granules{0, 1, 0, 1})) << "from the device to NVMe by way of the host";
  EXPECT_TRUE(reads_at(world, chunk, device, 1));
  EXPECT_EQ(moved(), (Granules{1, 1, 1, 1}));
  empty_device(world);
  EXPECT_EQ(moved(), (Granules{1, 1, 1, 1})) << "clean: nothing to move";
  write_at(world, chunk, host, 2);
  EXPECT_EQ(moved(), (Granules{2, 1, 1, 1}));
  EXPECT_TRUE(reads_at(world, chunk, device, 2));
  EXPECT_EQ(moved(), (Granules{2, 1, 2, 1}));
  empty_device(world);
  write_at(world, other, host, 3);
  EXPECT_EQ(moved(), (Granules{2, 2, 2, 1})) << "the host had room for one";
  write_at(world, chunk, device, 4);
  empty_device(world);
  EXPECT_EQ(moved(), (Granules{3, 3, 3, 2}));
  EXPECT_EQ(world.stream.usage().moved(Link::host_to_device, Kind::variance), 0u);
}

TEST_F(AccessStreamTest, kinds_sum_to_the_tier_and_peaks_are_remembered) {
  StreamWorld world(sizes(4, 4, 4));
  const ChunkId chunk = add(world, host, Kind::momentum);
  write_at(world, chunk, device, 1);
  world.stream.step_mark();
  world.stream.allocate(3 * granule, Kind::other);
  world.stream.free(3 * granule, Kind::other);
  world.stream.step_mark();
  const MemoryUsage usage = world.stream.usage();
  EXPECT_EQ(usage.now(device), granule);
  EXPECT_EQ(usage.now(device, Kind::momentum), granule);
  EXPECT_EQ(usage.peak(device), 4 * granule);
  EXPECT_EQ(usage.step_peak(device), 4 * granule);
  EXPECT_EQ(usage.chunk_peak(device), granule);
  EXPECT_EQ(usage.peak(device, Kind::other), 3 * granule);
  EXPECT_EQ(usage.now(host, Kind::other), TransferService::staging_blocks * granule) << "staging";
  for (const Tier tier : all_tiers) {
    std::uint64_t sum = 0;
    for (const Kind kind : all_kinds) sum += usage.now(tier, kind);
    EXPECT_EQ(sum, usage.now(tier)) << name_of(tier);
  }
  world.stream.step_mark();
  EXPECT_EQ(world.stream.usage().step_peak(device), granule) << "of the last complete step only";
}

TEST_F(AccessStreamTest, the_budgets_are_whole_again_after_the_stream) {
  EmulatedDevice memory(4 * granule);
  HostArena arena(granule, TransferService::staging_blocks + 4);
  Budget host_budget(host, arena.capacity_bytes());
  Budget nvme_budget(nvme, 0);
  for (int round = 0; round < 3; ++round) {
    AccessStream stream({&memory.budget(), &host_budget, &nvme_budget}, memory, arena, nullptr, nullptr, {});
    const ChunkId chunk = stream.add_chunk(Kind::parameter, 0, 3 * granule, host);
    const ChunkAccess access{chunk, device, write};
    stream.acquire({&access, 1});
  }
  EXPECT_EQ(memory.budget().used(), 0u);
  EXPECT_EQ(host_budget.used(), 0u);
  EXPECT_EQ(arena.used_bytes(), 0u);
}

TEST_F(AccessStreamTest, staging_that_does_not_fit_the_host_is_refused) {
  EmulatedDevice memory(4 * granule);
  HostArena arena(granule, TransferService::staging_blocks + 4);
  Budget host_budget(host, 3 * granule);
  Budget nvme_budget(nvme, 0);
  EXPECT_THROW(AccessStream({&memory.budget(), &host_budget, &nvme_budget}, memory, arena, nullptr, nullptr, {}),
               OutOfMemory);
  EXPECT_EQ(host_budget.used(), 0u);
}

// ---- Stalls

double stalled(const StreamWorld& world, StallCause cause) {
  return world.stream.usage().stall_seconds_by_cause[index_of(cause)];
}

TEST_F(AccessStreamTest, waiting_is_counted_by_its_cause) {
  StreamWorld world(sizes(1, 1, 2));
  const ChunkId chunk = add(world, nvme);
  write_at(world, chunk, host, 1);
  write_at(world, add(world, nvme), host, 2);
  EXPECT_GT(stalled(world, StallCause::host_room), 0) << "the first was written back";
  EXPECT_EQ(stalled(world, StallCause::nvme_to_host), 0);
  EXPECT_TRUE(reads_at(world, chunk, device, 1));
  EXPECT_GT(stalled(world, StallCause::nvme_to_host), 0);
  EXPECT_EQ(stalled(world, StallCause::device_room), 0);
  write_at(world, chunk, device, 3);
  world.stream.allocate(granule, Kind::other);
  EXPECT_GT(stalled(world, StallCause::device_room), 0);
  world.stream.free(granule, Kind::other);
  const MemoryUsage usage = world.stream.usage();
  double sum = 0;
  for (const double seconds : usage.stall_seconds_by_cause) sum += seconds;
  EXPECT_EQ(usage.stall_seconds, sum);
}

TEST_F(AccessStreamTest, what_is_there_stalls_nobody) {
  StreamWorld world(sizes(2, 2, 2));
  const ChunkId chunk = add(world, host);
  write_at(world, chunk, host, 1);
  EXPECT_TRUE(reads_at(world, chunk, device, 1));
  const double before = world.stream.usage().stall_seconds;
  EXPECT_GT(before, 0);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(reads_at(world, chunk, device, 1));
  EXPECT_EQ(world.stream.usage().stall_seconds, before);
}

TEST_F(AccessStreamTest, what_the_background_waits_for_stalls_nobody) {
  StreamWorld world(sizes(2, 2, 2));
  const ChunkId chunk = add(world, host);
  const ChunkAccess access{chunk, device, read};
  world.stream.acquire({&access, 1}, AccessOrigin::background_work).release();
  EXPECT_EQ(world.stream.usage().stall_seconds, 0);
  world.stream.discard(chunk);
  const ChunkAccess other{add(world, host), device, read};
  world.stream.acquire({&other, 1}, AccessOrigin::prior_work).release();
  EXPECT_GT(stalled(world, StallCause::host_to_device), 0) << "a thread of the program does it";
}

// ---- Pins and tensors of the program

TEST_F(AccessStreamTest, what_computation_uses_leaves_the_device_after_it) {
  StreamWorld world(sizes(1, 1, 1));
  const ChunkId chunk = add(world, host);
  write_at(world, chunk, device, 1);
  {
    const Pin pin = world.acquire(chunk, device);
    EmulatedComputation::of_this_process().queue(0.03);
  }
  const std::int64_t ends_ns = EmulatedComputation::of_this_process().ends_ns();
  world.stream.allocate(granule, Kind::other);
  EXPECT_GE(monotonic_ns(), ends_ns);
  EXPECT_TRUE(reads_at(world, chunk, host, 1));
  world.stream.free(granule, Kind::other);
}

TEST_F(AccessStreamTest, tensors_of_the_program_have_chunks_leave) {
  StreamWorld world(sizes(2, 2, 2));
  const ChunkId clean = add(world, host);
  const ChunkId dirty = add(world, nvme);
  write_at(world, clean, host, 1);
  EXPECT_TRUE(reads_at(world, clean, device, 1));
  write_at(world, dirty, device, 2);
  world.stream.allocate(2 * granule, Kind::other);
  EXPECT_EQ(world.state(clean, device), CopyState::absent);
  EXPECT_EQ(world.state(dirty, device), CopyState::absent);
  std::byte* tensor = world.device.allocate(2 * granule);
  std::memset(tensor, 1, 2 * granule);
  world.device.deallocate(tensor, 2 * granule);
  world.stream.free(2 * granule, Kind::other);
  EXPECT_TRUE(reads_at(world, clean, device, 1));
  EXPECT_TRUE(reads_at(world, dirty, device, 2));
}

TEST_F(AccessStreamTest, a_tensor_is_refused_when_nothing_can_leave) {
  StreamWorld world(sizes(2, 2, 2));
  const ChunkId pinned = add(world, host);
  Pin pin = world.acquire(pinned, device, write);
  const std::string text = thrown_text<OutOfMemory>([&] { world.stream.allocate(2 * granule, Kind::other); });
  EXPECT_THAT(text, HasSubstr("parameter 16KiB"));
  EXPECT_THAT(text, HasSubstr("raise device.memory to at least 48KiB"));
  pin.release();
  world.stream.allocate(2 * granule, Kind::other);
  EXPECT_THROW(world.acquire(pinned, device), OutOfMemory) << "and the other way round";
  world.stream.free(2 * granule, Kind::other);
  world.check_invariants();
}

TEST_F(AccessStreamTest, what_is_written_cannot_be_had_on_another_tier) {
  StreamWorld world(sizes(2, 2, 2));
  const ChunkId chunk = add(world, host);
  const Pin pin = world.acquire(chunk, device, write);
  EXPECT_THROW(world.acquire(chunk, host), LogicError);
}

TEST_F(AccessStreamTest, a_chunk_that_was_not_registered_cannot_be_acquired) {
  StreamWorld world(sizes(2, 2, 2));
  EXPECT_THROW(world.acquire(0, device), LogicError);
  const ChunkId chunk = add(world, host);
  EXPECT_TRUE(reads_at(world, chunk, device, 0)) << "and nothing is left behind";
}

TEST_F(AccessStreamTest, a_pin_is_released_by_any_thread_once) {
  StreamWorld world(sizes(1, 2, 2));
  const ChunkId chunk = add(world, host);
  Pin pin = world.acquire(chunk, device, write);
  write_pattern(pin, 0, device, granule, 7);
  std::thread([moved = std::move(pin)]() mutable { moved.release(); }).join();
  pin.release();  // what was moved from holds nothing
  world.stream.allocate(granule, Kind::other);
  world.stream.free(granule, Kind::other);
  EXPECT_TRUE(reads_at(world, chunk, device, 7));

  Pin replaced = world.acquire(chunk, device);
  replaced = world.acquire(chunk, host);
  world.stream.allocate(granule, Kind::other);
  world.stream.free(granule, Kind::other);
}

TEST_F(AccessStreamTest, who_waits_is_served_while_another_threads_transfer_is_still_under_way) {
  StreamWorld world(sizes(4, 2, 4));
  const ChunkId first = add(world, nvme);
  const ChunkId second = add(world, nvme);
  const ChunkId resting = add(world, host);
  write_at(world, first, device, 1);
  write_at(world, second, device, 2);
  world.stream.allocate(2 * granule, Kind::other);
  Pin pin = world.acquire(resting, host);

  // Two threads want room, for which both chunks have to be written back.
  const std::uint64_t written = world.engine.seen(IoOperation::Direction::write);
  world.engine.hold_writes();
  auto large = std::async(std::launch::async, [&] { world.stream.allocate(2 * granule, Kind::other); });
  while (world.engine.seen(IoOperation::Direction::write) < written + 2) std::this_thread::yield();
  auto small = std::async(std::launch::async, [&] { world.stream.allocate(granule, Kind::other); });
  world.engine.let_through(1);
  const auto left = [&](ChunkId chunk) { return world.state(chunk, device) == CopyState::absent; };
  while (!left(first) && !left(second)) std::this_thread::yield();

  // One transfer is still under way. Freed room serves those who wait without it.
  world.stream.free(2 * granule, Kind::other);
  pin.release();
  const bool served = large.wait_for(std::chrono::minutes(1)) == std::future_status::ready;
  world.engine.let_through(1);
  EXPECT_TRUE(served);
  large.get();
  small.get();
  world.check_invariants();
}

}  // namespace
}  // namespace terrace
