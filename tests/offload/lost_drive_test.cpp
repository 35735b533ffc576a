/// A drive that answers no more: everybody hears of it, and what the kernel may still use is left alone.
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/offload/transfer_world.h"

namespace terrace {
namespace {

using testing::HasSubstr;

class LostDriveTest : public TransferServiceTest {
 protected:
  /// From now on, and as briefly only where the drive is to be lost: a real one may take a while on a busy machine.
  void be_patient_for(std::chrono::milliseconds patience) {
    service_.emplace(device_, arena_, &store_, &*engine_,
                     TransferService::Options{.observer = &recorder_, .patience = patience});
  }

  /// What is thrown by a transfer that the drive has, and by those that come after it.
  static std::string unanswered(Outcome& outcome) {
    try {
      outcome.wait();
    } catch (const Unanswered& error) {
      return error.what();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "another error: " << error.what();
    }
    return "";
  }
};

INSTANTIATE_TEST_SUITE_P(On, LostDriveTest, testing::Values("threads", "io_uring"), named_by_engine);

TEST_P(LostDriveTest, a_queue_that_dies_ends_what_it_had_and_all_that_follows) {
  for (const bool reads : {true, false}) {
    be_patient_for(TransferService::default_patience);
    Object &first = object(many_bytes), &later = object(many_bytes), &elsewhere = object(many_bytes);
    for (Object* each : {&first, &later}) put(*each, nvme, 1);
    put(elsewhere, host, 2);
    const Tier from = reads ? nvme : host;
    const Tier to = reads ? host : nvme;
    inject(reads ? Direction::read : Direction::write, first, 3, Fault::dead_queue);
    Outcome& lost = start(first, from, to);
    EXPECT_THAT(unanswered(lost), HasSubstr("has no end: nvme: the queue is dead"));
    engine_->heal();
    for (int i = 0; i < 3; ++i) EXPECT_THROW(start(later, from, to).wait(), IoError) << "and at once, each time";
    move(elsewhere, host, device);
    EXPECT_EQ(get(elsewhere, device), pattern(2, many_bytes)) << "other links go on";
    if (reads) {
      put(elsewhere, nvme, 3);
    } else {
      EXPECT_EQ(get(later, nvme), pattern(1, many_bytes));
    }
  }
}

TEST_P(LostDriveTest, an_operation_without_an_answer_is_given_up_and_named) {
  for (const bool reads : {true, false}) {
    be_patient_for(TransferService::default_patience);
    Object &first = object(many_bytes), &later = object(many_bytes);
    for (Object* each : {&first, &later}) put(*each, nvme, 1);
    be_patient_for(std::chrono::seconds(2));
    inject(reads ? Direction::read : Direction::write, first, 5, Fault::stuck);
    Outcome& lost = reads ? start(first, nvme, host) : start(first, host, nvme);
    const std::string message = unanswered(lost);
    EXPECT_THAT(message, HasSubstr(std::string(reads ? "read" : "write") + " of 8192 B, " +
                                   store_.describe(first.places.nvme[5]) + ", has no end: the drive does not answer"));
    EXPECT_THAT(message, HasSubstr("hint: "));
    engine_->heal();
    Outcome& refused = reads ? start(later, nvme, host) : start(later, host, nvme);
    EXPECT_THROW(refused.wait(), IoError) << "nothing more is asked of that drive";
    EXPECT_THROW(store_.release({&first.places.nvme[5], 1}), LogicError) << "nobody else gets the extent";
  }
}

TEST_P(LostDriveTest, an_answer_that_comes_after_it_was_given_up_changes_nothing) {
  Object &first = object(many_bytes), &later = object(many_bytes);
  for (Object* each : {&first, &later}) put(*each, nvme, 1);
  be_patient_for(std::chrono::seconds(2));
  engine_->hold_writes();
  EXPECT_NE(unanswered(start(first, host, nvme)), "");
  engine_->let_through(1'000'000);
  for (int i = 0; i < 3; ++i) EXPECT_THROW(start(later, host, nvme).wait(), IoError) << "that drive stays lost";
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the answer comes
  be_patient_for(TransferService::default_patience);
  EXPECT_EQ(get(later, nvme), pattern(1, many_bytes));
  EXPECT_THROW(store_.release({&first.places.nvme[0], 1}), LogicError) << "nobody else gets the extent";
}

TEST_P(LostDriveTest, a_staging_block_that_the_kernel_may_still_use_is_lent_to_nobody) {
  Object& first = object(many_bytes);
  put(first, nvme, 1);
  be_patient_for(std::chrono::seconds(2));
  inject(Direction::read, first, 0, Fault::stuck);
  EXPECT_NE(unanswered(start(first, nvme, device)), "");
  const std::size_t used = arena_.used_bytes();
  service_.reset();
  EXPECT_EQ(used - arena_.used_bytes(), (TransferService::staging_blocks - 1) * granule);
}

TEST_P(LostDriveTest, what_waits_for_staging_that_is_lost_fails_too) {
  for (const bool reads : {true, false}) {
    be_patient_for(TransferService::default_patience);
    const Tier from = reads ? nvme : device;
    const Tier to = reads ? device : nvme;
    std::vector<Object*> objects;
    for (int i = 0; i < 4; ++i) put(*objects.emplace_back(&object(many_bytes)), from, 1);
    inject(reads ? Direction::read : Direction::write, *objects[0], 3, Fault::dead_queue);
    std::vector<Outcome*> outcomes;
    for (const Object* each : objects) outcomes.push_back(&start(*each, from, to));
    EXPECT_NE(unanswered(*outcomes[0]), "");
    for (Outcome* outcome : outcomes) EXPECT_THROW(outcome->wait(), IoError);
    engine_->heal();
    EXPECT_THROW(start(*objects[3], from, to).wait(), IoError);
  }
}

TEST_P(LostDriveTest, who_is_slow_to_begin_or_to_end_makes_no_drive_lost) {
  for (const bool reads : {true, false}) {
    const Tier from = reads ? nvme : host;
    const Tier to = reads ? host : nvme;
    std::vector<Object*> objects;
    be_patient_for(TransferService::default_patience);
    for (int i = 0; i < 6; ++i) put(*objects.emplace_back(&object(many_bytes)), from, 1);
    be_patient_for(std::chrono::seconds(2));
    std::vector<Outcome*> outcomes;
    for (int i = 0; i < 6; ++i) {
      TransferRequest slow = request(*objects[i], from, to);
      slow.prepare = [places = objects[i]->places, i] {
        std::this_thread::sleep_for(std::chrono::milliseconds(i == 0 ? 650 : 1350));  // the first: until all wait
        return places;
      };
      outcomes.push_back(&start(std::move(slow)));
      if (i != 3) continue;
      TransferRequest fails = request(object(granule), from, to);
      fails.prepare = []() -> TransferPlaces { throw LogicError("it does not begin"); };
      fails.done = [](const std::exception_ptr&) { std::this_thread::sleep_for(std::chrono::milliseconds(4000)); };
      start(std::move(fails));
    }
    for (Outcome* outcome : outcomes) EXPECT_NO_THROW(outcome->wait());
  }
}

TEST_P(LostDriveTest, slowness_is_no_loss) {
  be_patient_for(std::chrono::seconds(30));
  Object& each = object(many_bytes);
  put(each, host, 4);
  engine_->inject({.fault = Fault::slow, .probability = 0.3});
  move(each, host, nvme);
  wipe(each);
  move(each, nvme, device);
  EXPECT_EQ(get(each, device), pattern(4, many_bytes));
}

}  // namespace
}  // namespace terrace
