/// Every test runs with each engine that this system has.
#include "offload/transfer_service.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/clock.h"
#include "base/error.h"
#include "offload/emulated_computation.h"
#include "offload/emulated_device.h"
#include "offload/thread_engine.h"
#include "offload/uring_engine.h"
#include "tests/base/temporary_folder.h"
#include "tests/offload/fault_injecting_engine.h"

namespace terrace {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using Direction = FaultInjectingEngine::Direction;
using enum TransferPriority;

constexpr auto device = Tier::device;
constexpr auto host = Tier::host;
constexpr auto nvme = Tier::nvme;

constexpr std::size_t granule = 8192;
constexpr std::size_t many_blocks = 21;
/// The last block is a partial one, of more than half a page: bits flip in the first half.
constexpr std::uint64_t many_bytes = (many_blocks - 1) * granule + 3000;
constexpr std::size_t operations_at_once = 64;  ///< that the service gives to an engine each way, of small blocks
constexpr std::size_t guard_bytes = 64;

std::vector<std::byte> pattern(std::uint64_t stamp, std::uint64_t bytes) {
  std::vector<std::byte> result(bytes);
  std::uint64_t word = stamp * 0x9e3779b97f4a7c15;
  for (std::byte& each : result) each = static_cast<std::byte>((word = word * 6364136223846793005 + stamp) >> 56);
  return result;
}

/// What a transfer has reported so far.
class Outcome {
 public:
  void done(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    ++times_done_;
    error_ = std::move(error);
    changed_.notify_all();
  }
  void write_failed(ExtentId extent, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(times_done_, 0) << "write_failed comes before done";
    EXPECT_NE(error, nullptr);
    failed_writes_.push_back(extent);
  }

  /// Throws the transfer's error.
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return times_done_ > 0; });
    if (error_) std::rethrow_exception(error_);
  }
  bool succeeded() {
    try {
      wait();
    } catch (const std::exception& error) {
      return false;
    }
    return true;
  }

  int times_done() const {
    const std::lock_guard lock(mutex_);
    return times_done_;
  }
  std::vector<ExtentId> failed_writes() const {
    const std::lock_guard lock(mutex_);
    return failed_writes_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int times_done_ = 0;
  std::exception_ptr error_;
  std::vector<ExtentId> failed_writes_;
};

/// Holds the thread of a link in a `prepare` until it is opened.
class Gate {
 public:
  void pass() {
    entered_.set_value();
    opened_.get_future().wait();
  }
  void wait_until_entered() { entered_.get_future().wait(); }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> entered_, opened_;
};

class Recorder final : public TransferObserver {
 public:
  void on_transfer(const TransferRecord& record) noexcept override {
    const std::lock_guard lock(mutex_);
    records_.push_back(record);
  }
  std::vector<TransferRecord> records() const {
    const std::lock_guard lock(mutex_);
    return records_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<TransferRecord> records_;
};

std::unique_ptr<IoEngine> make_engine(const std::string& name) {
  if (name == "io_uring") return std::make_unique<UringEngine>();
  return std::make_unique<ThreadEngine>();
}

std::string named_by_engine(const testing::TestParamInfo<const char*>& engine) { return engine.param; }

class TransferServiceTest : public testing::TestWithParam<const char*> {
 protected:
  /// Room for some bytes on all tiers at once.
  struct Object {
    std::uint64_t bytes;
    TransferPlaces places;
  };

  void SetUp() override {
    std::string why_not;
    if (GetParam() == std::string("io_uring") && !UringEngine::available(&why_not)) GTEST_SKIP() << why_not;
    engine_.emplace(make_engine(GetParam()));
    service_.emplace(device_, arena_, &store_, &*engine_, &recorder_);
  }
  void TearDown() override {
    service_.reset();
    for (const Outcome& outcome : outcomes_) EXPECT_EQ(outcome.times_done(), 1);
    EXPECT_EQ(recorder_.records().size(), outcomes_.size());
    for (const Object& object : objects_) device_.unmap_slot(object.places.device, object.bytes + guard_bytes);
  }

  Object& object(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto blocks = static_cast<std::size_t>((bytes + granule - 1) / granule);
    Object& object = objects_.emplace_back(bytes, TransferPlaces{.device = device_.map_slot(bytes + guard_bytes),
                                                                 .host = arena_.allocate(blocks),
                                                                 .nvme = store_.reserve(blocks)});
    wipe(object);
    return object;
  }
  /// Of what is on the device and the host nothing remains.
  static void wipe(Object& object) {
    std::memset(object.places.device, 0xee, object.bytes + guard_bytes);
    for (std::byte* block : object.places.host) std::memset(block, 0xee, granule);
  }

  TransferRequest request(const Object& object, Tier from, Tier to, TransferPriority priority = demand) {
    TransferRequest request;
    request.from = from;
    request.to = to;
    request.kind = Kind::master;
    request.bytes = object.bytes;
    request.priority = priority;
    request.prepare = [places = object.places] { return places; };
    return request;
  }
  Outcome& start(TransferRequest request, TransferId* id = nullptr) {
    Outcome* outcome = nullptr;
    {
      const std::lock_guard lock(mutex_);
      outcome = &outcomes_.emplace_back();
    }
    request.done = [outcome, then = std::move(request.done)](std::exception_ptr error) {
      if (then) then(error);
      outcome->done(std::move(error));
    };
    request.write_failed = [outcome](ExtentId extent, std::exception_ptr error) {
      outcome->write_failed(extent, std::move(error));
    };
    const TransferId started = service_->start(std::move(request));
    if (id != nullptr) *id = started;
    return *outcome;
  }
  Outcome& start(const Object& object, Tier from, Tier to, TransferPriority priority = demand) {
    return start(request(object, from, to, priority));
  }
  void move(const Object& object, Tier from, Tier to) { start(object, from, to).wait(); }

  static void for_each_block(const Object& object,
                             const std::function<void(std::byte*, std::uint64_t, std::size_t)>& f) {
    for (std::size_t i = 0; i < object.places.host.size(); ++i) {
      f(object.places.host[i], i * granule,
        static_cast<std::size_t>(std::min<std::uint64_t>(granule, object.bytes - i * granule)));
    }
  }
  void put(Object& object, Tier tier, std::uint64_t stamp) {
    const std::vector<std::byte> bytes = pattern(stamp, object.bytes);
    if (tier == device) {
      std::memcpy(object.places.device, bytes.data(), bytes.size());
      return;
    }
    for_each_block(object, [&](std::byte* block, std::uint64_t offset, std::size_t length) {
      std::memcpy(block, bytes.data() + offset, length);
    });
    if (tier == nvme) {
      move(object, host, nvme);
      wipe(object);
    }
  }
  std::vector<std::byte> get(Object& object, Tier tier) {
    std::vector<std::byte> bytes(object.bytes);
    if (tier == device) {
      std::memcpy(bytes.data(), object.places.device, bytes.size());
      return bytes;
    }
    if (tier == nvme) {
      wipe(object);
      move(object, nvme, host);
    }
    for_each_block(object, [&](std::byte* block, std::uint64_t offset, std::size_t length) {
      std::memcpy(bytes.data() + offset, block, length);
    });
    return bytes;
  }
  static bool guard_is_untouched(const Object& object) {
    return std::all_of(object.places.device + object.bytes, object.places.device + object.bytes + guard_bytes,
                       [](std::byte each) { return each == std::byte{0xee}; });
  }

  std::uint64_t moved(Link link, Kind kind = Kind::master) const {
    return service_->moved()[index_of(link)][index_of(kind)];
  }
  /// The `number`-th operation from now on of that direction suffers the fault.
  void inject(Direction direction, std::uint64_t number, Fault fault) {
    engine_->heal();
    engine_->inject({.fault = fault, .direction = direction, .nth = engine_->seen(direction) + number});
  }

  TemporaryFolder folder_;
  EmulatedDevice device_{64 << 20};
  HostArena arena_{granule, 1024};
  NvmeStore store_{{folder_.path()}, ExtentFileHeader::kBytes + 1024 * granule, granule};
  Recorder recorder_;
  std::optional<FaultInjectingEngine> engine_;
  std::optional<TransferService> service_;
  std::mutex mutex_;
  std::deque<Object> objects_;
  std::deque<Outcome> outcomes_;
};

INSTANTIATE_TEST_SUITE_P(On, TransferServiceTest, testing::Values("threads", "io_uring"), named_by_engine);

struct Route {
  Tier from;
  Tier to;
};
constexpr std::array<Route, 6> routes{
    {{host, device}, {device, host}, {host, nvme}, {nvme, host}, {nvme, device}, {device, nvme}}};

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
  inject(Direction::write, many_blocks - 1, Fault::io_error);
  EXPECT_FALSE(start(each, host, nvme).succeeded());
  inject(Direction::write, many_blocks - 1, Fault::io_error);
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

// ---- Order

/// Extents by the order in which their writes began; `fill_drive` returns when no more writes can begin until some are
/// let through.
class TransferOrderTest : public TransferServiceTest {
 protected:
  Outcome& fill_drive() {
    engine_->before_write = [this](std::uint64_t offset) {
      const std::lock_guard lock(order_mutex_);
      offsets_.push_back(offset);
      changed_.notify_all();
    };
    engine_->hold_writes();
    Outcome& filling = start(object(operations_at_once * granule), host, nvme);
    std::unique_lock lock(order_mutex_);
    changed_.wait(lock, [&] { return offsets_.size() == operations_at_once; });
    offsets_.clear();
    return filling;
  }
  void release_drive() { engine_->let_through(1'000'000); }
  std::string owner_of_writes(const std::vector<std::pair<char, const Object*>>& owners) {
    const std::lock_guard lock(order_mutex_);
    std::string order;
    for (const std::uint64_t offset : offsets_) {
      for (const auto& [name, object] : owners) {
        for (const ExtentId extent : object->places.nvme) {
          if (store_.describe(extent).ends_with("offset " + std::to_string(offset))) order += name;
        }
      }
    }
    return order;
  }

  std::mutex order_mutex_;
  std::condition_variable changed_;
  std::vector<std::uint64_t> offsets_;
};

INSTANTIATE_TEST_SUITE_P(On, TransferOrderTest, testing::Values("threads", "io_uring"), named_by_engine);

TEST_P(TransferOrderTest, on_the_drive_the_most_urgent_goes_first_whenever_it_came) {
  fill_drive();
  Object &a = object(3 * granule), &b = object(3 * granule), &c = object(3 * granule), &d = object(3 * granule);
  std::vector<Outcome*> outcomes{&start(a, host, nvme, write_back), &start(b, host, nvme, prefetch),
                                 &start(c, host, nvme, write_back), &start(d, host, nvme, demand)};
  release_drive();
  for (Outcome* outcome : outcomes) outcome->wait();
  EXPECT_EQ(owner_of_writes({{'a', &a}, {'b', &b}, {'c', &c}, {'d', &d}}), "dddbbbaaaccc");
}

TEST_P(TransferOrderTest, a_raised_transfer_overtakes) {
  Outcome& filling = fill_drive();
  Object &a = object(3 * granule), &b = object(3 * granule), &c = object(3 * granule);
  TransferId raised{};
  std::vector<Outcome*> outcomes{&filling, &start(a, host, nvme, prefetch), &start(b, host, nvme, prefetch),
                                 &start(request(c, host, nvme, write_back), &raised)};
  service_->raise(raised, demand);
  service_->raise(raised, write_back);  // which lowers nothing
  release_drive();
  for (Outcome* outcome : outcomes) outcome->wait();
  EXPECT_EQ(owner_of_writes({{'a', &a}, {'b', &b}, {'c', &c}}), "cccaaabbb");
  service_->raise(raised, demand);  // it has ended
  const std::vector<TransferRecord> records = recorder_.records();
  EXPECT_EQ(std::count_if(records.begin(), records.end(), [](const auto& each) { return each.priority == demand; }), 2)
      << "it and what filled the drive";
}

TEST_P(TransferOrderTest, on_the_way_to_the_device_the_most_urgent_goes_first) {
  Gate gate;
  TransferRequest first = request(object(granule), host, device);
  first.prepare = [&, places = objects_.back().places] {
    gate.pass();
    return places;
  };
  start(std::move(first));
  gate.wait_until_entered();
  std::string order;
  const auto named = [&](char name, TransferPriority priority) {
    TransferRequest each = request(object(3 * granule), host, device, priority);
    each.done = [&order, name](const std::exception_ptr&) { order += name; };  // all on the thread of the link
    return each;
  };
  TransferId raised{};
  std::vector<Outcome*> outcomes{&start(named('a', write_back)), &start(named('b', prefetch)),
                                 &start(named('c', demand)), &start(named('d', prefetch), &raised)};
  service_->raise(raised, demand);
  gate.open();
  for (Outcome* outcome : outcomes) outcome->wait();
  EXPECT_EQ(order, "cdba");
}

TEST_P(TransferOrderTest, what_has_to_come_after_computation_ends_after_it) {
  for (const auto& [from, to] : routes) {
    if (from != device && to != device) continue;
    Object& each = object(many_bytes);
    put(each, from, 3);
    EmulatedComputation::of_this_process().queue(0.03);
    TransferRequest after = request(each, from, to);
    after.after = device_.computation();
    const std::int64_t ends_ns = EmulatedComputation::of_this_process().ends_ns();
    start(std::move(after)).wait();
    EXPECT_GE(monotonic_ns(), ends_ns) << name_of(from) << " to " << name_of(to);
    EXPECT_EQ(get(each, to), pattern(3, many_bytes));
  }
}

TEST_P(TransferOrderTest, what_needs_no_staging_passes_what_waits_for_it) {
  Gate gate;
  TransferRequest blocking = request(object(granule), host, device);
  blocking.prepare = [&, places = objects_.back().places] {
    gate.pass();
    return places;
  };
  Object &staged = object(many_bytes), &direct = object(many_bytes);
  put(staged, nvme, 1);
  put(direct, nvme, 2);
  start(std::move(blocking));
  gate.wait_until_entered();
  Outcome& waiting = start(staged, nvme, device, demand);
  start(direct, nvme, host, write_back).wait();
  EXPECT_EQ(waiting.times_done(), 0);
  gate.open();
  waiting.wait();
  EXPECT_EQ(get(staged, device), pattern(1, many_bytes));
  EXPECT_EQ(get(direct, host), pattern(2, many_bytes));
}

// ---- Failures

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

struct Failure {
  Tier from;
  Tier to;
  Fault fault;
};

class TransferFailureTest : public TransferServiceTest {
 protected:
  static std::size_t block_at(int where) { return where * (many_blocks - 1) / 2; }

  /// Has a transfer fail at a block, and checks all that a failure promises.
  void fail_at(std::size_t block, const Failure& failure) {
    const bool reads = failure.from == nvme;
    SCOPED_TRACE(std::string(name_of(failure.from)) + " to " + std::string(name_of(failure.to)) + ", block " +
                 std::to_string(block) + ", fault " + std::to_string(static_cast<int>(failure.fault)));
    Object& bad = object(many_bytes);
    Object& good = object(many_bytes);
    put(bad, failure.from, 1);
    put(good, failure.from, 2);
    inject(reads ? Direction::read : Direction::write, block, failure.fault);

    TransferRequest failing = request(bad, failure.from, failure.to);
    std::string still_in_flight;
    failing.done = [&](const std::exception_ptr&) {
      try {
        store_.release(bad.places.nvme);  // which refuses while anything of it is read or written
      } catch (const std::exception& error) {
        still_in_flight = error.what();
      }
    };
    Outcome& failed = start(std::move(failing));
    Outcome& other = start(good, failure.from, failure.to, write_back);
    const std::string where = store_.describe(bad.places.nvme[block]);  // PATH, offset O
    const std::string path = where.substr(0, where.find(", "));
    const std::string offset = where.substr(where.find(", ") + 2);
    try {
      failed.wait();
      ADD_FAILURE() << "it has not failed";
    } catch (const IoError& error) {
      EXPECT_NE(failure.fault, Fault::flipped_bit);
      EXPECT_THAT(error.what(), HasSubstr(path));
      EXPECT_THAT(error.what(), HasSubstr(offset + " "));
    } catch (const CorruptData& error) {
      EXPECT_EQ(failure.fault, Fault::flipped_bit);
      EXPECT_THAT(error.what(), HasSubstr(path));
      EXPECT_THAT(error.what(), HasSubstr(offset + " "));
    }
    EXPECT_EQ(still_in_flight, "");
    if (reads) {
      EXPECT_THAT(failed.failed_writes(), testing::IsEmpty());
    } else {
      EXPECT_THAT(failed.failed_writes(), ElementsAre(bad.places.nvme[block]));
    }
    other.wait();
    EXPECT_EQ(get(good, failure.to), pattern(2, many_bytes)) << "others go on";
    store_.release(good.places.nvme);
  }
};

INSTANTIATE_TEST_SUITE_P(On, TransferFailureTest, testing::Values("threads", "io_uring"), named_by_engine);

// Staging that is not given back would soon be missing: there is less of it than failures here.
TEST_P(TransferFailureTest, a_failed_read_fails_its_transfer_and_leaves_nothing_behind) {
  for (const Tier to : {device, host}) {
    for (const Fault fault : {Fault::io_error, Fault::short_transfer, Fault::flipped_bit}) {
      for (const int where : {0, 1, 2}) fail_at(block_at(where), {nvme, to, fault});
    }
  }
}

TEST_P(TransferFailureTest, a_failed_write_fails_its_transfer_and_leaves_nothing_behind) {
  for (const Tier from : {device, host}) {
    for (const Fault fault : {Fault::io_error, Fault::no_space, Fault::short_transfer}) {
      for (const int where : {0, 1, 2}) fail_at(block_at(where), {from, nvme, fault});
    }
  }
}

TEST_P(TransferFailureTest, a_bit_that_flips_on_its_way_to_the_drive_is_found_when_it_is_read) {
  for (const int where : {0, 1, 2}) {
    Object& each = object(many_bytes);
    put(each, device, 1);
    inject(Direction::write, block_at(where), Fault::flipped_bit);
    move(each, device, nvme);
    EXPECT_THROW(move(each, nvme, device), CorruptData);
    EXPECT_THROW(move(each, nvme, host), CorruptData);
    move(each, device, nvme);  // and can be written again
    EXPECT_EQ(get(each, nvme), pattern(1, many_bytes));
  }
}

TEST_P(TransferFailureTest, each_of_several_failed_writes_is_reported_once) {
  for (const Tier from : {host, device}) {
    Object& each = object(many_bytes);
    engine_->failing_writes = 1000;
    Outcome& outcome = start(each, from, nvme);
    EXPECT_THROW(outcome.wait(), IoError);
    engine_->failing_writes = 0;
    std::vector<ExtentId> failed = outcome.failed_writes();
    EXPECT_GE(failed.size(), 1u);
    std::sort(failed.begin(), failed.end());
    EXPECT_EQ(std::adjacent_find(failed.begin(), failed.end()), failed.end());
    for (const ExtentId extent : failed) store_.retire(extent);  // refused of an extent in flight
  }
}

TEST_P(TransferFailureTest, a_failed_transfer_can_be_started_again) {
  Object& each = object(many_bytes);
  put(each, device, 4);
  engine_->failing_writes = 1;
  EXPECT_FALSE(start(each, device, nvme).succeeded());
  move(each, device, nvme);
  wipe(each);
  engine_->failing_reads = 1;
  EXPECT_FALSE(start(each, nvme, device).succeeded());
  move(each, nvme, device);
  EXPECT_EQ(get(each, device), pattern(4, many_bytes));
}

// ---- Life

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
    service_.emplace(device_, arena_, &store_, &*engine_, &recorder_);
  }
}

TEST_P(TransferServiceTest, gives_its_staging_back_to_the_arena) {
  const std::size_t with_service = arena_.used_bytes();
  service_.reset();
  EXPECT_EQ(with_service - arena_.used_bytes(), TransferService::staging_blocks * granule);
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

}  // namespace
}  // namespace terrace
