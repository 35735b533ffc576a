#include "offload/transfer_service.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/huge_pages.h"
#include "tests/offload/failing_allocation.h"
#include "tests/offload/pages_in_process.h"
#include "tests/offload/refused_call.h"
#include "tests/offload/transfer_world.h"

namespace terrace {
namespace {

INSTANTIATE_TEST_SUITE_P(On, TransferServiceTest, testing::Values("threads", "io_uring", "cuda"), named_by_engine);

// ---- Bytes

TEST_P(TransferServiceTest, every_route_delivers_every_byte_and_no_more_at_any_size) {
  std::uint64_t stamp = 0;
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{4096}, granule - 1, granule, granule + 1,
                                    2 * granule, many_bytes, many_blocks * granule}) {
    for (const auto& [from, to] : routes) {
      Object& each = object(bytes);
      put(each, from, ++stamp);
      move(each, from, to);
      EXPECT_TRUE(guard_is_untouched(each)) << name_of(from) << " to " << name_of(to) << ", " << bytes << " B";
      EXPECT_EQ(get(each, to), pattern(stamp, bytes))
          << name_of(from) << " to " << name_of(to) << ", " << bytes << " B";
    }
  }
}

TEST_P(TransferServiceTest, the_source_of_a_transfer_keeps_its_bytes) {
  for (const auto& [from, to] : routes) {
    Object& each = object(many_bytes);
    put(each, from, 3);
    move(each, from, to);
    EXPECT_EQ(get(each, from), pattern(3, many_bytes)) << name_of(from) << " to " << name_of(to);
  }
}

TEST_P(TransferServiceTest, a_fill_zeroes_its_range_and_no_more) {
  for (const std::uint64_t bytes : {std::uint64_t{1}, granule - 1, granule, granule + 1, many_bytes}) {
    for (const Tier to : {device, host}) {
      Object& each = object(bytes);
      TransferRequest fill = request(each, host, to);
      fill.fill = true;
      start(std::move(fill)).wait();
      EXPECT_EQ(get(each, to), std::vector<std::byte>(bytes)) << name_of(to) << ", " << bytes << " B";
      EXPECT_TRUE(guard_is_untouched(each));
    }
  }
  EXPECT_EQ(service_->moved(), TransferService::Moved{}) << "what is zeroed crosses no link";
}

TEST_P(TransferServiceTest, a_fill_that_does_not_zero_keeps_what_is_there) {
  for (const Tier to : {device, host}) {
    Object& each = object(many_bytes);
    put(each, to, 3);
    TransferRequest fill = request(each, host, to);
    fill.fill = true;
    fill.zeroes = false;
    start(std::move(fill)).wait();
    EXPECT_EQ(get(each, to), pattern(3, many_bytes)) << name_of(to);
  }
}

TEST_P(TransferServiceTest, many_transfers_of_several_threads_keep_to_their_own_bytes) {
  const auto work = [&](std::uint64_t seed) {
    std::vector<Object*> mine;
    for (std::uint64_t i = 0; i < 6; ++i) mine.push_back(&object(1 + (i * 7919 + seed * 104729) % (10 * granule)));
    const auto all = [&](Tier from, Tier to) {
      std::vector<Outcome*> outcomes;
      for (std::size_t i = 0; i < mine.size(); ++i) {
        outcomes.push_back(&start(*mine[i], from, to, static_cast<TransferPriority>(i % transfer_priority_count)));
      }
      for (Outcome* outcome : outcomes) outcome->wait();
    };
    for (int round = 0; round < 5; ++round) {
      for (std::size_t i = 0; i < mine.size(); ++i) put(*mine[i], device, seed * 100 + i);
      all(device, nvme);
      for (Object* each : mine) wipe(*each);
      all(nvme, device);
      all(device, host);
      for (std::size_t i = 0; i < mine.size(); ++i) {
        EXPECT_TRUE(get(*mine[i], host) == pattern(seed * 100 + i, mine[i]->bytes));
        put(*mine[i], host, seed * 1000 + i);
      }
      all(host, nvme);
      for (Object* each : mine) wipe(*each);
      all(nvme, host);
      all(host, device);
      for (std::size_t i = 0; i < mine.size(); ++i) {
        EXPECT_TRUE(get(*mine[i], device) == pattern(seed * 1000 + i, mine[i]->bytes));
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
}

TEST_P(TransferServiceTest, staging_that_comes_back_is_never_overlooked) {
  Object& each = object(9 * granule);
  for (int round = 0; round < 200; ++round) {
    move(each, device, nvme);
    move(each, nvme, device);
  }
}

// ---- Counting and observing

TEST_P(TransferServiceTest, counts_bytes_by_link_and_kind) {
  Object& each = object(many_bytes);
  const auto move_as = [&](Kind kind, Tier from, Tier to) {
    TransferRequest of_kind = request(each, from, to);
    of_kind.kind = kind;
    start(std::move(of_kind)).wait();
  };
  move_as(Kind::parameter, host, device);
  move_as(Kind::gradient, device, host);
  move_as(Kind::momentum, device, nvme);
  move_as(Kind::variance, nvme, device);
  TransferService::Moved expected{};
  const auto expect = [&](Link link, Kind kind) { expected[index_of(link)][index_of(kind)] = many_bytes; };
  expect(Link::host_to_device, Kind::parameter);
  expect(Link::device_to_host, Kind::gradient);
  expect(Link::device_to_host, Kind::momentum);
  expect(Link::host_to_nvme, Kind::momentum);
  expect(Link::nvme_to_host, Kind::variance);
  expect(Link::host_to_device, Kind::variance);
  EXPECT_EQ(service_->moved(), expected);
}

TEST_P(TransferServiceTest, what_failed_counts_as_not_moved) {
  Object& each = object(many_bytes);
  inject(Direction::write, each, many_blocks - 1, Fault::io_error);
  EXPECT_FALSE(start(each, host, nvme).succeeded());
  EXPECT_FALSE(start(each, device, nvme).succeeded());
  EXPECT_EQ(service_->moved(), TransferService::Moved{});
}

TEST_P(TransferServiceTest, the_observer_sees_each_transfer_end_once_before_its_done) {
  Object& good = object(many_bytes);
  Object& bad = object(granule);
  put(good, host, 1);
  const auto records_at_done = [&](TransferRequest request) {
    std::size_t seen = 0;
    request.done = [&](const std::exception_ptr&) { seen = recorder_.records().size(); };
    start(std::move(request)).succeeded();
    return seen;
  };
  EXPECT_EQ(records_at_done(request(good, host, nvme, write_back)), 1u);
  EXPECT_EQ(records_at_done(request(good, nvme, device, prefetch)), 2u);
  EXPECT_EQ(records_at_done(request(bad, nvme, host)), 3u) << "it was never written";
  TransferRequest unprepared = request(bad, host, device);
  unprepared.prepare = []() -> TransferPlaces { throw OutOfMemory("no room"); };
  EXPECT_EQ(records_at_done(std::move(unprepared)), 4u);

  const std::vector<TransferRecord> records = recorder_.records();
  ASSERT_EQ(records.size(), 4u);
  for (const TransferRecord& record : records) {
    EXPECT_LE(record.queued_ns, record.started_ns);
    EXPECT_LE(record.started_ns, record.ended_ns);
    EXPECT_EQ(record.kind, Kind::master);
    EXPECT_FALSE(record.fill);
  }
  EXPECT_EQ(records[1].from, nvme);
  EXPECT_EQ(records[1].to, device);
  EXPECT_EQ(records[1].bytes, many_bytes);
  EXPECT_EQ(records[1].priority, prefetch);
  EXPECT_FALSE(records[0].failed);
  EXPECT_FALSE(records[1].failed);
  EXPECT_TRUE(records[2].failed);
  EXPECT_TRUE(records[3].failed);
}

// ---- Life

TEST_P(TransferServiceTest, an_error_in_prepare_fails_that_transfer_only) {
  for (const auto& [from, to] : routes) {
    Object& good = object(many_bytes);
    put(good, from, 5);
    int prepared = 0;
    TransferRequest unprepared = request(object(many_bytes), from, to);
    unprepared.prepare = [&]() -> TransferPlaces {
      ++prepared;
      throw OutOfMemory("no room for this");
    };
    Outcome& bad = start(std::move(unprepared));
    Outcome& other = start(good, from, to);
    EXPECT_THROW(bad.wait(), OutOfMemory);
    EXPECT_EQ(prepared, 1);
    other.wait();
    EXPECT_EQ(get(good, to), pattern(5, many_bytes)) << name_of(from) << " to " << name_of(to);
  }
}

TEST_P(TransferServiceTest, done_may_start_the_next_transfer) {
  Object& each = object(many_bytes);
  put(each, host, 6);
  std::promise<Outcome*> second;
  TransferRequest first = request(each, host, nvme);
  first.done = [&](const std::exception_ptr&) { second.set_value(&start(each, nvme, device)); };
  start(std::move(first)).wait();
  second.get_future().get()->wait();
  EXPECT_EQ(get(each, device), pattern(6, many_bytes));
}

TEST_P(TransferServiceTest, the_destructor_waits_for_all_that_was_started) {
  for (int round = 0; round < 20; ++round) {
    std::vector<Outcome*> outcomes;
    Object& written = object(many_bytes);
    put(written, nvme, 1);
    for (const auto& [from, to] : routes) {
      outcomes.push_back(&start(from == nvme ? written : object(3 * granule), from, to, write_back));
    }
    service_.reset();
    for (const Outcome* outcome : outcomes) EXPECT_EQ(outcome->times_done(), 1);
    service_.emplace(device_, arena_, &store_, &*engine_, TransferService::Options{.observer = &recorder_});
  }
}

TEST_P(TransferServiceTest, gives_its_staging_back_to_the_arena) {
  const std::size_t with_service = arena_.used_bytes();
  service_.reset();
  EXPECT_EQ(with_service - arena_.used_bytes(), TransferService::staging_blocks * granule);
}

/// Opens as many queues as it is told to, then no more.
class ShortOfQueues final : public IoEngine {
 public:
  explicit ShortOfQueues(int queues) : left_(queues) {}
  std::string_view name() const noexcept override { return engine_.name(); }
  std::unique_ptr<IoQueue> open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered,
                                      std::span<const IoFile* const> files) override {
    if (left_.fetch_sub(1) <= 0) throw IoError("no more queues");
    return engine_.open_queue(depth, registered, files);
  }

 private:
  ThreadEngine engine_;
  std::atomic<int> left_;
};

TEST_P(TransferServiceTest, bytes_stay_whole_while_the_arena_is_held_and_let_go_of) {
  std::vector<Object*> objects;
  for (int i = 0; i < 4; ++i) put(*objects.emplace_back(&object(many_bytes)), nvme, static_cast<std::uint64_t>(i) + 1);
  std::jthread holder([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      service_->hold_arena(arena_.capacity_bytes());
      EXPECT_EQ(arena_.trim(), 0u) << "it is held";
      service_->let_go_of_arena();
      arena_.trim();
    }
  });
  for (int round = 0; round < 30; ++round) {
    std::vector<Outcome*> outcomes;
    for (Object* each : objects) {
      wipe(*each);
      outcomes.push_back(&start(*each, nvme, host));
    }
    for (Outcome* outcome : outcomes) outcome->wait();
    for (std::size_t i = 0; i < objects.size(); ++i) {
      EXPECT_EQ(get(*objects[i], host), pattern(i + 1, many_bytes));
      move(*objects[i], host, nvme);
      EXPECT_EQ(get(*objects[i], nvme), pattern(i + 1, many_bytes));
    }
  }
}

TEST_P(TransferServiceTest, more_of_the_arena_than_there_is_memory_for_is_not_held) {
  object(many_bytes);
  service_->hold_arena(arena_.used_region().size() - 1);
  const std::vector<std::byte*> more = arena_.allocate(3);
  for (std::byte* block : more) *block = std::byte{1};
  arena_.free(more);
  EXPECT_GT(arena_.trim(), 0u);
}

TEST_P(TransferServiceTest, to_hold_the_arena_and_let_go_of_it_takes_no_further_queue) {
  ShortOfQueues engine(2);
  service_.emplace(device_, arena_, &store_, &engine, TransferService::Options{.observer = &recorder_});
  Object& each = object(many_bytes);
  for (int round = 0; round < 3; ++round) {
    service_->hold_arena(arena_.capacity_bytes());
    put(each, nvme, 1);
    service_->let_go_of_arena();
    EXPECT_EQ(get(each, nvme), pattern(1, many_bytes));
  }
  service_.reset();  // before its engine
}

TEST_P(TransferServiceTest, one_that_cannot_open_all_of_its_queues_ends_at_once_and_leaves_nothing) {
  const std::size_t before = arena_.used_bytes();
  for (const int queues : {0, 1}) {
    ShortOfQueues engine(queues);
    EXPECT_THROW(TransferService(device_, arena_, &store_, &engine), IoError) << queues;
    EXPECT_EQ(arena_.used_bytes(), before);
  }
}

TEST_P(TransferServiceTest, one_that_cannot_start_for_lack_of_memory_leaves_nothing_behind) {
  if (!FailingAllocation::possible()) GTEST_SKIP();
  Object& each = object(many_bytes);
  put(each, nvme, 1);
  std::deque<Outcome> outcomes;
  for (const auto& [from, to] : {Ends{nvme, device}, Ends{nvme, host}}) {
    int failures = 0;
    for (bool started = false; !started; ++failures) {
      ASSERT_LT(failures, 100);
      Outcome& outcome = outcomes.emplace_back();
      TransferRequest wanted = request(each, from, to);
      wanted.done = [&](std::exception_ptr error) { outcome.done(std::move(error)); };
      try {
        const FailingAllocation failing(failures);
        service_->start(std::move(wanted));
        started = true;
      } catch (const std::bad_alloc&) {
        EXPECT_EQ(outcome.times_done(), 0);
      }
      if (started) outcome.wait();
    }
    EXPECT_GT(failures, 2);
  }
  service_.reset();  // which waits for all that was started, and for nothing else
  recorder_.forget_all_but(outcomes_.size());
}

TEST_P(TransferServiceTest, refuses_what_is_no_transfer) {
  Object& each = object(granule);
  const auto expect_refused = [&](TransferRequest request) { EXPECT_THROW(service_->start(request), LogicError); };
  for (const auto& [from, to] : routes) {
    TransferRequest empty = request(each, from, to);
    empty.bytes = 0;
    expect_refused(empty);
  }
  for (const Tier tier : all_tiers) expect_refused(request(each, tier, tier));
  TransferRequest fill = request(each, host, nvme);
  fill.fill = true;
  expect_refused(fill);
}

TEST(TransferServiceWithoutNvme, moves_between_host_and_device_and_refuses_the_rest) {
  EmulatedDevice emulated(1 << 20);
  HostArena arena(granule, TransferService::staging_blocks + 4);
  TransferService service(emulated, arena, nullptr, nullptr);
  std::byte* slot = emulated.map_slot(2 * granule);
  const std::vector<std::byte*> blocks = arena.allocate(2);
  for (std::byte* block : blocks) std::memset(block, 0x5a, granule);
  Outcome outcome;
  TransferRequest request;
  request.from = host;
  request.to = device;
  request.bytes = 2 * granule;
  request.prepare = [&] { return TransferPlaces{.device = slot, .host = blocks, .nvme = {}}; };
  request.done = [&](std::exception_ptr error) { outcome.done(std::move(error)); };
  for (const auto& [from, to] : routes) {
    if (from != nvme && to != nvme) continue;
    TransferRequest refused = request;
    refused.from = from;
    refused.to = to;
    EXPECT_THROW(service.start(refused), LogicError) << name_of(from) << " to " << name_of(to);
  }
  service.start(request);
  outcome.wait();
  EXPECT_TRUE(std::all_of(slot, slot + 2 * granule, [](std::byte each) { return each == std::byte{0x5a}; }));
  emulated.unmap_slot(slot, 2 * granule);
  arena.free(blocks);
}

TEST(TransferServiceWithoutThreads, says_which_of_them_could_not_be_started_and_how_to_go_on) {
  EmulatedDevice emulated(1 << 20);
  HostArena arena(granule, TransferService::staging_blocks);
  const TemporaryFolder folder;
  NvmeStore store({folder.path()}, extent_file_bytes(granule, 4), granule);
  UringEngine engine;  // which has no threads of its own
  for (NvmeStore* const drive : {&store, static_cast<NvmeStore*>(nullptr)}) {
    if (drive != nullptr && !UringEngine::available()) continue;
    EXPECT_TRUE(holds_where_call_is_refused(SYS_clone3, EAGAIN, [&] {
      try {
        const TransferService service(emulated, arena, drive, &engine);
      } catch (const IoError& error) {
        const std::string link = drive != nullptr ? "nvme→host" : "host→device";
        return std::string(error.what()) == "transfer: starting the thread of the link " + link +
                                                " failed: Resource temporarily unavailable (EAGAIN)\n  hint: raise the "
                                                "limit on processes (ulimit -u)";
      }
      return false;
    }));
  }
}

// ---- Memory

TEST(TransferService, stages_in_huge_pages_as_far_as_its_blocks_fill_them) {
  constexpr std::size_t block = 64 << 10;
  const TemporaryFolder folder;
  NvmeStore store({folder.path()}, extent_file_bytes(block, 4), block);
  const auto engine = make_engine("threads");
  EmulatedDevice emulated{std::uint64_t{1} << 20U};
  HostArena arena(block, 1000);
  const TransferService service(emulated, arena, &store, engine.get(), {.staging_blocks_each_way = 40});
  EXPECT_EQ(arena.used_region().size(), 80 * block);
  const auto begin = reinterpret_cast<std::uintptr_t>(arena.region().data());
  const std::vector<Mapping> mappings = mappings_of_process();
  const auto first = std::ranges::find(mappings, begin, &Mapping::begin);
  ASSERT_NE(first, mappings.end());
  EXPECT_TRUE(first->wants_huge_pages);
  EXPECT_EQ(first->end - begin, 2 * huge_page_bytes);
}

}  // namespace
}  // namespace terrace
