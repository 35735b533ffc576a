#include "memory/timeline.h"

#include <array>
#include <cstdint>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/clock.h"
#include "base/error.h"
#include "memory/current_op.h"
#include "memory/timeline_trace.h"
#include "tests/base/temporary_folder.h"
#include "tests/memory/stream_world.h"

namespace terrace {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr std::uint64_t KiB = 1024;
constexpr std::uint64_t large = 1024 * KiB;

template <class Event>
std::vector<Event> all_of(const TimelineSnapshot& snapshot) {
  std::vector<Event> found;
  for (const TimelineEvent& event : snapshot.events) {
    if (const auto* const one = std::get_if<Event>(&event)) found.push_back(*one);
  }
  return found;
}

TransferRecord transfer(Tier from, Tier to, std::int64_t started_ns, std::int64_t ended_ns, std::uint32_t index = 7) {
  return {.from = from,
          .to = to,
          .fill = from == to,
          .kind = Kind::parameter,
          .index = index,
          .bytes = 4096,
          .priority = TransferPriority::prefetch,
          .failed = false,
          .queued_ns = started_ns - 500,
          .started_ns = started_ns,
          .ended_ns = ended_ns};
}

class TimelineTest : public testing::Test {
 protected:
  explicit TimelineTest(std::uint64_t bytes = large) : timeline(bytes, {&device, &host, &nvme}) {}

  std::uint64_t used(const UsageByKind& usage, Tier tier, Kind kind) { return usage[index_of(tier)][index_of(kind)]; }
  /// What is used once all events of the snapshot have been.
  static UsageByKind usage_after(const TimelineSnapshot& snapshot) {
    UsageByKind usage = snapshot.usage;
    for (const UsageEvent& event : all_of<UsageEvent>(snapshot)) {
      usage[index_of(event.tier)][index_of(event.kind)] = event.bytes;
    }
    return usage;
  }

  Budget device{Tier::device, 100 * KiB};
  Budget host{Tier::host, 200 * KiB};
  Budget nvme{Tier::nvme, 0};
  Timeline timeline;
};

TEST_F(TimelineTest, tells_steps_in_order_without_gaps) {
  timeline.end_step(monotonic_ns(), {});
  timeline.end_step(monotonic_ns(), {});
  timeline.end_step(monotonic_ns(), {});
  const TimelineSnapshot snapshot = timeline.snapshot();
  const auto steps = all_of<StepEvent>(snapshot);
  ASSERT_EQ(steps.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(steps[i].number, i + 1);
    EXPECT_LE(steps[i].begin_ns, steps[i].end_ns);
    EXPECT_EQ(steps[i].begin_ns, i > 0 ? steps[i - 1].end_ns : snapshot.origin_ns);
  }
}

TEST_F(TimelineTest, the_first_step_begins_when_it_is_said_to) {
  timeline.begin_first_step();
  timeline.end_step(monotonic_ns(), {.stall_ns = 5, .bytes_moved = {1, 2, 3, 4}});
  timeline.begin_first_step();  // too late
  timeline.end_step(monotonic_ns(), {});
  const TimelineSnapshot snapshot = timeline.snapshot();
  const auto steps = all_of<StepEvent>(snapshot);
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_GE(steps[0].begin_ns, snapshot.origin_ns);
  EXPECT_EQ(steps[1].begin_ns, steps[0].end_ns);
  EXPECT_EQ(all_of<StepTotals>(snapshot)[0].stall_ns, 5);
}

TEST_F(TimelineTest, tells_in_which_op_a_thread_was_stalled) {
  timeline.record_stall(StallCause::update, 1, 2, std::nullopt);
  CurrentOp::enter("aten::linear");
  CurrentOp::enter("aten::addmm");
  timeline.record_stall(StallCause::host_to_device, 3, 4, ChunkName{Kind::gradient, 5});
  CurrentOp::leave();
  timeline.record_stall(StallCause::host_room, 5, 6, std::nullopt);
  std::thread([&] { timeline.record_stall(StallCause::device_room, 7, 8, std::nullopt); }).join();
  CurrentOp::leave();
  const auto stalls = all_of<StallEvent>(timeline.snapshot());
  ASSERT_EQ(stalls.size(), 4u);
  EXPECT_THAT((std::array{stalls[0].op, stalls[1].op, stalls[2].op, stalls[3].op}),
              ElementsAre(testing::StrEq(""), testing::StrEq("aten::addmm"), testing::StrEq("aten::linear"),
                          testing::StrEq("")));
  EXPECT_EQ(stalls[1].chunk->kind, Kind::gradient);
  EXPECT_EQ(stalls[1].chunk->index, 5u);
}

TEST(CurrentOp, survives_more_nesting_than_it_names) {
  for (int i = 0; i < 100; ++i) CurrentOp::enter("deep");
  EXPECT_STREQ(CurrentOp::name(), "deep");
  for (int i = 0; i < 100; ++i) CurrentOp::leave();
  EXPECT_STREQ(CurrentOp::name(), "");
  CurrentOp::leave();
  EXPECT_STREQ(CurrentOp::name(), "");
}

TEST_F(TimelineTest, stores_what_changed_of_what_is_used) {
  ASSERT_TRUE(device.try_reserve(Kind::parameter, 10 * KiB));
  ASSERT_TRUE(host.try_reserve(Kind::other, 20 * KiB));
  timeline.end_step(monotonic_ns(), {});
  ASSERT_TRUE(device.try_reserve(Kind::gradient, 5 * KiB));
  timeline.end_step(monotonic_ns(), {});
  timeline.end_step(monotonic_ns(), {});
  const TimelineSnapshot snapshot = timeline.snapshot();
  const auto usage = all_of<UsageEvent>(snapshot);
  ASSERT_EQ(usage.size(), 3u);
  EXPECT_EQ(usage[2].kind, Kind::gradient);
  EXPECT_EQ(usage[2].bytes, 5 * KiB);
  EXPECT_EQ(usage[2].tier_peak, 15 * KiB);
  EXPECT_EQ(used(usage_after(snapshot), Tier::device, Kind::parameter), 10 * KiB);
}

TEST_F(TimelineTest, knows_the_highest_use_between_two_samples) {
  timeline.end_step(monotonic_ns(), {});
  ASSERT_TRUE(device.try_reserve(Kind::activation, 60 * KiB));
  device.release(Kind::activation, 60 * KiB);
  timeline.end_step(monotonic_ns(), {});
  timeline.end_step(monotonic_ns(), {});
  const auto usage = all_of<UsageEvent>(timeline.snapshot());
  ASSERT_EQ(usage.size(), 1u);
  EXPECT_EQ(usage[0].tier_peak, 60 * KiB);
}

class SmallTimeline : public TimelineTest {
 protected:
  SmallTimeline() : TimelineTest(Timeline::least_bytes) {}
};

TEST_F(SmallTimeline, drops_the_oldest_and_says_how_many_and_since_when_none_is_missing) {
  constexpr std::int64_t many = 2000;
  for (std::int64_t i = 1; i <= many; ++i) timeline.record_update(monotonic_ns(), monotonic_ns(), i);
  const TimelineSnapshot snapshot = timeline.snapshot();
  const auto updates = all_of<UpdateEvent>(snapshot);
  EXPECT_GT(snapshot.dropped, 0u);
  EXPECT_EQ(updates.size() + snapshot.dropped, static_cast<std::size_t>(many));
  EXPECT_EQ(updates.back().set, many);
  EXPECT_EQ(updates.front().set, snapshot.dropped + 1);
  EXPECT_LE(snapshot.complete_since_ns, updates.front().end_ns);
  EXPECT_GT(snapshot.complete_since_ns, snapshot.origin_ns);
}

TEST_F(SmallTimeline, begins_with_what_the_dropped_events_said_was_used) {
  for (std::uint64_t i = 1; i <= 500; ++i) {
    ASSERT_TRUE(device.try_reserve(Kind::parameter, 100));
    ASSERT_TRUE(device.try_reserve(Kind::gradient, 10));
    timeline.record_update(monotonic_ns(), monotonic_ns(), 1);
    const TimelineSnapshot snapshot = timeline.snapshot();
    ASSERT_EQ(used(usage_after(snapshot), Tier::device, Kind::parameter), 100 * i);
    ASSERT_EQ(used(snapshot.usage, Tier::device, Kind::parameter),
              10 * used(snapshot.usage, Tier::device, Kind::gradient))
        << "samples go whole";
  }
  EXPECT_GT(timeline.snapshot().dropped, 0u);
}

TEST_F(SmallTimeline, never_allocates_beyond_what_it_was_given) {
  for (int i = 0; i < 1000; ++i) timeline.end_step(monotonic_ns(), {});
  EXPECT_LE(timeline.snapshot().events.size() * sizeof(TimelineEvent), Timeline::least_bytes);
}

TEST(Timeline, keeps_nothing_without_memory) {
  Budget budget(Tier::device, KiB);
  Timeline timeline(0, {&budget, &budget, &budget});
  const Reservation used(budget, Kind::other, 1);
  timeline.end_step(monotonic_ns(), {});
  timeline.record_stall(StallCause::update, 1, 2, std::nullopt);
  timeline.on_transfer(transfer(Tier::host, Tier::device, 1, 2));
  timeline.sample_if_due();
  EXPECT_TRUE(timeline.snapshot().events.empty());
  EXPECT_THROW(timeline.write("unused.json"), LogicError);
}

TEST(Timeline, refuses_less_than_what_holds_a_few_samples) {
  Budget budget(Tier::device, KiB);
  EXPECT_THROW(Timeline(Timeline::least_bytes - 1, {&budget, &budget, &budget}), LogicError);
}

TEST_F(TimelineTest, a_path_that_cannot_be_written_is_named) {
  const TemporaryFolder folder;
  try {
    timeline.write(folder.path() / "missing" / "timeline.json");
    FAIL() << "it was written";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("missing/timeline.json"));
    EXPECT_THAT(error.what(), HasSubstr("No such file"));
  }
}

TEST_F(TimelineTest, a_full_disk_is_told) { EXPECT_THROW(timeline.write("/dev/full"), IoError); }

// ---- The trace

/// The lines of a trace that hold all of these.
std::vector<std::string> lines_with(const std::string& trace, const std::vector<std::string>& parts) {
  std::vector<std::string> found;
  std::istringstream in(trace);
  for (std::string line; std::getline(in, line);) {
    bool all = true;
    for (const std::string& part : parts) all = all && line.find(part) != std::string::npos;
    if (all) found.push_back(line);
  }
  return found;
}

/// Of a timeline that is complete, where nothing is used.
TimelineSnapshot snapshot_of(std::vector<TimelineEvent> events) {
  return {
      .origin_ns = 0, .complete_since_ns = 0, .dropped = 0, .budgets = {}, .usage = {}, .events = std::move(events)};
}

std::string trace_of(const TimelineSnapshot& snapshot) {
  std::ostringstream out;
  write_trace(snapshot, out);
  return out.str();
}

TEST(TimelineTrace, puts_a_transfer_on_each_link_that_it_crosses) {
  const TimelineSnapshot snapshot{.origin_ns = 1000,
                                  .complete_since_ns = 1000,
                                  .dropped = 0,
                                  .budgets = {1, 2, 3},
                                  .usage = {},
                                  .events = {transfer(Tier::nvme, Tier::device, 3000, 5500)}};
  const std::string trace = trace_of(snapshot);
  const auto slices = lines_with(trace, {"\"ph\":\"X\""});
  ASSERT_EQ(slices.size(), 2u);
  EXPECT_THAT(slices[0], HasSubstr("\"name\":\"parameter 7\""));
  EXPECT_THAT(slices[0], HasSubstr("\"ts\":2.000,\"dur\":2.500"));
  EXPECT_THAT(slices[0], HasSubstr("\"link\":\"nvme→host\""));
  EXPECT_THAT(slices[0], HasSubstr("\"bytes\":4096"));
  EXPECT_THAT(slices[0], HasSubstr("\"priority\":\"prefetch\""));
  EXPECT_THAT(slices[0], HasSubstr("\"queued_us\":0.500"));
  EXPECT_THAT(slices[1], HasSubstr("\"link\":\"host→device\""));
  EXPECT_THAT(trace, HasSubstr("\"budget_bytes\":{\"device\":1,\"host\":2,\"nvme\":3}"));
}

TEST(TimelineTrace, puts_what_overlaps_on_further_rows) {
  const TimelineSnapshot snapshot =
      snapshot_of({transfer(Tier::host, Tier::device, 1000, 2000, 1), transfer(Tier::host, Tier::device, 1500, 2500, 2),
                   transfer(Tier::host, Tier::device, 2000, 3000, 3)});
  const std::string trace = trace_of(snapshot);
  const auto tid_of = [&](const std::string& name) {
    const auto lines = lines_with(trace, {"\"ph\":\"X\"", "\"name\":\"" + name + "\""});
    EXPECT_EQ(lines.size(), 1u);
    return std::stoi(lines.at(0).substr(lines.at(0).find("\"tid\":") + 6));
  };
  EXPECT_EQ(tid_of("parameter 2"), tid_of("parameter 1") + 1);
  EXPECT_EQ(tid_of("parameter 3"), tid_of("parameter 1"));
  EXPECT_EQ(lines_with(trace, {"thread_name", "\"host→device 2\""}).size(), 1u);
  EXPECT_EQ(lines_with(trace, {"thread_name", "\"host→nvme\""}).size(), 1u) << "a link is shown that nothing crosses";
}

TEST(TimelineTrace, keeps_chunks_that_begin_apart_from_links) {
  const TimelineSnapshot snapshot = snapshot_of({transfer(Tier::device, Tier::device, 1000, 2000)});
  const std::string trace = trace_of(snapshot);
  EXPECT_EQ(lines_with(trace, {"\"cat\":\"begun\""}).size(), 1u);
  EXPECT_THAT(trace, Not(HasSubstr("\"link\":")));
}

TEST(TimelineTrace, a_step_has_what_had_been_moved_and_waited_for_by_its_end) {
  const TimelineSnapshot snapshot = snapshot_of({StepEvent{.begin_ns = 1000, .end_ns = 3500, .number = 9},
                                                 StepTotals{.stall_ns = 1234, .bytes_moved = {1, 2, 3, 4}}});
  const auto lines = lines_with(trace_of(snapshot), {"\"name\":\"step 9\""});
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], HasSubstr("\"ts\":1.000,\"dur\":2.500"));
  EXPECT_THAT(lines[0], HasSubstr("\"stall_us_so_far\":1.234,\"bytes_moved_so_far\":{\"nvme→host\":1,"));
}

TEST(TimelineTrace, counts_each_tier_by_kind_beside_its_budget) {
  const TimelineSnapshot snapshot{
      .origin_ns = 0,
      .complete_since_ns = 0,
      .dropped = 0,
      .budgets = {100, 0, 0},
      .usage = {},
      .events = {UsageEvent{.at_ns = 2000, .bytes = 30, .tier_peak = 90, .tier = Tier::device, .kind = Kind::parameter},
                 UsageEvent{.at_ns = 2000, .bytes = 12, .tier_peak = 90, .tier = Tier::device, .kind = Kind::other}}};
  const std::string trace = trace_of(snapshot);
  EXPECT_EQ(lines_with(trace, {"\"ph\":\"C\"", "\"name\":\"device bytes\"", "\"ts\":2.000",
                               "\"args\":{\"parameter\":30,\"other\":12}"})
                .size(),
            1u)
      << "one sample";
  EXPECT_EQ(lines_with(trace, {"\"device total\"", "\"ts\":2.000", "{\"bytes\":42}"}).size(), 1u);
  EXPECT_EQ(lines_with(trace, {"\"device peak\"", "{\"bytes\":0}"}).size(), 1u) << "a tier has one from the start";
  EXPECT_EQ(lines_with(trace, {"\"device peak\"", "{\"bytes\":90}"}).size(), 1u);
  EXPECT_EQ(lines_with(trace, {"\"device budget\"", "{\"bytes\":100}"}).size(), 2u);
  EXPECT_TRUE(lines_with(trace, {"\"host bytes\""}).empty()) << "a tier that is not there";
}

TEST(TimelineTrace, quotes_the_names_of_ops) {
  const TimelineSnapshot snapshot =
      snapshot_of({StallEvent{.begin_ns = 1, .end_ns = 2, .op = "my\"op\\\n", .chunk = {}, .cause = {}}});
  EXPECT_THAT(trace_of(snapshot), HasSubstr("\"op\":\"my\\\"op\\\\ \""));
}

// ---- Of a stream

class TimelineOfAStream : public testing::Test {
 protected:
  static constexpr std::size_t granule = 4096;
  StreamWorld world{{.granule_bytes = granule,
                     .device_bytes = 2 * granule,
                     .host_bytes = 3 * granule,
                     .nvme_extents = 8,
                     .prefetch_depth = 2,
                     .timeline_bytes = large}};
};

TEST_F(TimelineOfAStream, has_every_byte_that_moved_and_every_moment_that_was_waited_for) {
  std::vector<ChunkId> chunks;
  for (std::uint32_t i = 0; i < 6; ++i)
    chunks.push_back(world.stream.add_chunk(Kind::parameter, i, granule, Tier::nvme));
  for (int step = 0; step < 3; ++step) {
    world.stream.begin_pass(1);
    for (const ChunkId chunk : chunks) world.acquire(chunk, Tier::device, Access::write);
    world.stream.step_mark();
  }
  const MemoryUsage before = world.stream.usage();
  for (const ChunkId chunk : chunks) world.acquire(chunk, Tier::device, Access::write);  // once it moves no more
  const MemoryUsage usage = world.stream.usage();
  const TimelineSnapshot snapshot = world.timeline.snapshot();
  ASSERT_EQ(snapshot.dropped, 0u);
  std::array<double, stall_cause_count> stalled{};
  for (const StallEvent& stall : all_of<StallEvent>(snapshot)) {
    stalled[index_of(stall.cause)] += static_cast<double>(stall.end_ns - stall.begin_ns) * 1e-9;
  }
  for (const StallCause cause : all_stall_causes) {
    EXPECT_NEAR(stalled[index_of(cause)], usage.stall_seconds_by_cause[index_of(cause)], 1e-9) << name_of(cause);
  }
  EXPECT_EQ(all_of<StepEvent>(snapshot).size(), 3u);
  std::uint64_t from_device = 0;
  std::uint64_t to_nvme = 0;
  for (const TransferRecord& each : all_of<TransferRecord>(snapshot)) {
    EXPECT_LT(each.index, chunks.size());
    EXPECT_FALSE(each.failed);
    from_device += each.from == Tier::device && !each.fill ? each.bytes : 0;
    to_nvme += each.to == Tier::nvme ? each.bytes : 0;
  }
  EXPECT_GE(from_device, before.moved(Link::device_to_host));
  EXPECT_GE(to_nvme, before.moved(Link::host_to_nvme));
  for (const UsageEvent& each : all_of<UsageEvent>(snapshot)) {
    EXPECT_LE(each.tier_peak, snapshot.budgets[index_of(each.tier)]);
  }
}

TEST_F(TimelineOfAStream, is_recorded_and_read_by_many_threads) {
  std::vector<ChunkId> chunks;
  for (std::uint32_t i = 0; i < 6; ++i)
    chunks.push_back(world.stream.add_chunk(Kind::parameter, i, granule, Tier::nvme));
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::size_t round = 0; round < 60; ++round) {
        world.acquire(chunks[(round * (thread + 1)) % chunks.size()], Tier::host, Access::read);
        world.stream.step_mark();
      }
    });
  }
  for (int reader = 0; reader < 20; ++reader) {
    const TimelineSnapshot snapshot = world.timeline.snapshot();
    UsageByKind usage = snapshot.usage;
    for (std::size_t at = 0; at < snapshot.events.size(); ++at) {
      const auto* const event = std::get_if<UsageEvent>(&snapshot.events[at]);
      if (event == nullptr) continue;
      usage[index_of(event->tier)][index_of(event->kind)] = event->bytes;
    }
    EXPECT_LE(usage[index_of(Tier::host)][index_of(Kind::parameter)], snapshot.budgets[index_of(Tier::host)]);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(all_of<StepEvent>(world.timeline.snapshot()).size(), 120u);
}

}  // namespace
}  // namespace terrace
