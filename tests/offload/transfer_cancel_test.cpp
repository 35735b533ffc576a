/// What becomes of a transfer that is cancelled.
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/offload/gate.h"
#include "tests/offload/transfer_world.h"

namespace terrace {
namespace {

class TransferCancelTest : public TransferServiceTest {
 protected:
  /// Holds the thread of a link until the gate is opened.
  void hold(Tier from, Tier to, Gate& gate) {
    Object& blocking = object(granule);
    put(blocking, from, 1);
    TransferRequest held = request(blocking, from, to);
    held.prepare = [&gate, places = blocking.places] {
      gate.pass();
      return places;
    };
    start(std::move(held));
    gate.wait_until_entered();
  }
};

INSTANTIATE_TEST_SUITE_P(On, TransferCancelTest, testing::Values("threads", "io_uring"), named_by_engine);

TEST_P(TransferCancelTest, what_has_not_started_ends_cancelled_ahead_of_what_waits) {
  for (const TransferPriority urgency : {prefetch, demand}) {
    for (const auto& [from, to] : routes) {
      SCOPED_TRACE(std::string(name_of(from)) + " to " + std::string(name_of(to)));
      Object &urgent = object(many_bytes), &cancelled = object(many_bytes);
      for (Object* each : {&urgent, &cancelled}) put(*each, from, 2);
      Gate gate;
      hold(from, to, gate);
      std::string order;
      const auto named = [&](const Object& each, char name, TransferPriority priority) {
        TransferRequest with_name = request(each, from, to, priority);
        with_name.done = [&order, name](const std::exception_ptr&) {
          order += name;
        };  // both on threads that follow each other
        return with_name;
      };
      Outcome& before = start(named(urgent, 'u', urgency));
      TransferRequest never = named(cancelled, 'c', early);
      never.prepare = []() -> TransferPlaces { throw LogicError("nothing of it may start"); };
      TransferId id{};
      Outcome& outcome = start(std::move(never), &id);
      EXPECT_TRUE(service_->cancel(id));
      EXPECT_FALSE(service_->cancel(id)) << "once";
      gate.open();
      EXPECT_THROW(outcome.wait(), Cancelled);
      before.wait();
      EXPECT_EQ(order, "cu");
      EXPECT_EQ(get(urgent, to), pattern(2, many_bytes));
      move(cancelled, from, to);
      EXPECT_EQ(get(cancelled, to), pattern(2, many_bytes)) << "it can be started again";
    }
  }
}

TEST_P(TransferCancelTest, what_has_started_or_ended_goes_on) {
  Object& each = object(many_bytes);
  put(each, host, 3);
  Gate gate;
  TransferRequest started = request(each, host, device);
  started.prepare = [&gate, places = each.places] {
    gate.pass();
    return places;
  };
  TransferId id{};
  Outcome& outcome = start(std::move(started), &id);
  gate.wait_until_entered();
  EXPECT_FALSE(service_->cancel(id));
  gate.open();
  outcome.wait();
  EXPECT_FALSE(service_->cancel(id)) << "it has ended";
  EXPECT_FALSE(service_->cancel(static_cast<TransferId>(1'000'000))) << "it has never been";
  EXPECT_EQ(get(each, device), pattern(3, many_bytes));
}

TEST_P(TransferCancelTest, no_more_transfers_than_the_service_takes_wait_at_a_time) {
  Gate gate;
  hold(host, device, gate);
  Object& each = object(granule);
  std::vector<TransferId> waiting;
  const auto try_start = [&] {
    TransferRequest another = request(each, host, device);
    another.done = [](const std::exception_ptr&) {};
    return service_->start(std::move(another));
  };
  while (waiting.size() + 1 < TransferService::most_transfers) waiting.push_back(try_start());
  EXPECT_THROW(try_start(), LogicError);
  for (const TransferId id : waiting) EXPECT_TRUE(service_->cancel(id));
  gate.open();
  service_.reset();
  // What was started here has no outcome of the fixture's.
  EXPECT_EQ(recorder_.records().size(), outcomes_.size() + waiting.size());
  recorder_.forget_all_but(outcomes_.size());
}

}  // namespace
}  // namespace terrace
