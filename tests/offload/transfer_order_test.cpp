/// Which transfer goes first on a link, and what it comes after.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/clock.h"
#include "base/error.h"
#include "offload/emulated_computation.h"
#include "offload/nvme_worker.h"
#include "tests/offload/gate.h"
#include "tests/offload/transfer_world.h"

namespace terrace {
namespace {

/// That the service gives to an engine each way.
const std::size_t operations_at_once = NvmeWorker::default_depth(granule);

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

TEST_P(TransferOrderTest, a_write_that_is_ready_for_the_drive_is_not_overtaken_for_ever) {
  fill_drive();
  Object &a = object(20 * granule), &b = object(40 * granule);
  std::vector<Outcome*> outcomes{&start(a, host, nvme, write_back), &start(b, host, nvme, demand)};
  release_drive();
  for (Outcome* outcome : outcomes) outcome->wait();
  const std::string order = owner_of_writes({{'a', &a}, {'b', &b}});
  EXPECT_LE(order.find('a'), 2 * LinkQueue::most_urgent_in_a_row) << order;
  const std::size_t last_b = order.rfind('b');
  EXPECT_LE(std::count(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(last_b), 'a'), 5)
      << "one at a time takes its turn: " << order;
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

TEST_P(TransferOrderTest, what_the_drive_has_answered_does_not_wait_for_all_that_begins) {
  constexpr int others = 100;  // far longer in all than any drive takes to answer, while it has not
  std::vector<Object*> objects;
  for (int i = 0; i < others + 2; ++i) put(*objects.emplace_back(&object(granule)), nvme, 1);
  Gate gate;
  TransferRequest holds_the_link = request(*objects[0], nvme, host);
  holds_the_link.prepare = [&gate, places = objects[0]->places] {
    gate.pass();
    return places;
  };
  std::vector<Outcome*> outcomes{&start(std::move(holds_the_link))};
  gate.wait_until_entered();
  std::atomic<int> begun = 0, begun_at_end = others;
  std::atomic<bool> has_ended = false;
  TransferRequest first = request(*objects[1], nvme, host);
  first.done = [&](const std::exception_ptr&) {
    begun_at_end = begun.load();
    has_ended = true;
  };
  outcomes.push_back(&start(std::move(first)));
  for (int i = 0; i < others; ++i) {
    TransferRequest later = request(*objects[2 + i], nvme, host, prefetch);
    later.prepare = [&begun, &has_ended, places = objects[2 + i]->places] {
      ++begun;
      if (!has_ended) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return places;
    };
    outcomes.push_back(&start(std::move(later)));
  }
  gate.open();
  for (Outcome* outcome : outcomes) outcome->wait();
  EXPECT_LT(begun_at_end, others);
}

TEST_P(TransferOrderTest, what_fails_and_is_started_again_at_once_keeps_nobody_waiting) {
  constexpr int most = 300'000;
  Object &fails = object(granule), &waits = object(many_bytes);
  put(waits, nvme, 1);
  std::atomic<bool> has_ended = false;
  std::promise<int> restarts_in_all;
  int restarts = 0;  // on the link's thread
  std::function<void()> start_failing = [&] {
    TransferRequest failing = request(fails, nvme, host);
    failing.prepare = []() -> TransferPlaces { throw LogicError("it never begins"); };
    failing.done = [&](const std::exception_ptr&) {
      if (has_ended || ++restarts == most) {
        restarts_in_all.set_value(restarts);
      } else {
        start_failing();
      }
    };
    service_->start(std::move(failing));
  };
  start_failing();
  TransferRequest waiting = request(waits, nvme, host);
  waiting.done = [&](const std::exception_ptr&) { has_ended = true; };
  start(std::move(waiting)).wait();
  EXPECT_LT(restarts_in_all.get_future().get(), most);
  service_.reset();
  recorder_.forget_all_but(outcomes_.size());
}

}  // namespace
}  // namespace terrace
