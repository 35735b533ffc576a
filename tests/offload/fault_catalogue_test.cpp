/// What each thing that a drive can do wrong comes to: who gets which error, what can still be read, that nothing else
/// was harmed, and that a store closed after it opens again.
#include <chrono>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "offload/emulated_device.h"
#include "offload/transfer_service.h"
#include "tests/base/temporary_folder.h"
#include "tests/offload/engine_by_name.h"
#include "tests/offload/error_is.h"
#include "tests/offload/fault_injecting_engine.h"

namespace terrace {
namespace {

using Direction = IoOperation::Direction;

constexpr std::size_t granule = 8192;
constexpr std::size_t blocks = 4;
constexpr std::size_t faulty_block = 2;

/// A store, and a service over it, from opening to closing.
class Life {
 public:
  Life(const std::string& engine, const std::filesystem::path& folder)
      : store_({folder}, extent_file_bytes(granule, 16 * blocks), granule),
        engine_(make_engine(engine)),
        service_(device_, arena_, &store_, &engine_, {.patience = std::chrono::milliseconds(600)}) {}

  struct Object {
    TransferPlaces places;
    std::vector<ExtentId> failed_writes;
  };
  Object& object() {
    return *objects_.emplace_back(std::make_unique<Object>(
        Object{{.device = nullptr, .host = arena_.allocate(blocks), .nvme = store_.reserve(blocks)}, {}}));
  }

  static void fill(Object& object, int value) {
    for (std::byte* block : object.places.host) std::memset(block, value, granule);
  }
  static bool is_filled(const Object& object, int value) {
    std::vector<std::byte> expected(granule, static_cast<std::byte>(value));
    for (const std::byte* block : object.places.host) {
      if (std::memcmp(block, expected.data(), granule) != 0) return false;
    }
    return true;
  }

  /// The error with which a transfer ended; null where it succeeded.
  std::exception_ptr move(Object& object, Tier from, Tier to) {
    std::promise<std::exception_ptr> ended;
    TransferRequest request;
    request.from = from;
    request.to = to;
    request.bytes = blocks * granule;
    request.prepare = [&] { return object.places; };
    request.done = [&](std::exception_ptr error) { ended.set_value(std::move(error)); };
    request.write_failed = [&](ExtentId extent, const std::exception_ptr&) { object.failed_writes.push_back(extent); };
    service_.start(std::move(request));
    return ended.get_future().get();
  }
  std::exception_ptr write(Object& object) { return move(object, Tier::host, Tier::nvme); }
  std::exception_ptr read(Object& object) { return move(object, Tier::nvme, Tier::host); }

  /// What happens to one block of an object from now on.
  void inject(Fault fault, Direction direction, const Object& object) {
    const std::string where = store_.describe(object.places.nvme[faulty_block]);
    engine_.inject({.fault = fault, .direction = direction, .when = [where](const IoOperation& operation) {
                      return where == operation.file->path.string() + ", offset " + std::to_string(operation.offset);
                    }});
  }
  void heal() { engine_.heal(); }

  NvmeStore& store() { return store_; }

 private:
  EmulatedDevice device_{1 << 20};
  HostArena arena_{granule, 16 * blocks + TransferService::staging_blocks};
  NvmeStore store_;
  FaultInjectingEngine engine_;
  std::vector<std::unique_ptr<Object>> objects_;
  TransferService service_;
};

class FaultCatalogue : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    std::string why_not;
    if (GetParam() == std::string("io_uring") && !UringEngine::available(&why_not)) GTEST_SKIP() << why_not;
    life_.emplace(GetParam(), folder_.path());
    harmed_ = &life_->object();
    other_ = &life_->object();
    for (const auto& [object, value] : {std::pair{harmed_, 1}, {other_, 2}}) {
      Life::fill(*object, value);
      ASSERT_EQ(life_->write(*object), nullptr);
    }
  }

  /// The write of a new value meets the fault.
  std::exception_ptr faulty_write(Fault fault) {
    Life::fill(*harmed_, 3);
    life_->inject(fault, Direction::write, *harmed_);
    std::exception_ptr error = life_->write(*harmed_);
    EXPECT_TRUE(Life::is_filled(*harmed_, 3)) << "what was to be written is there still";
    return error;
  }
  std::exception_ptr faulty_read(Fault fault) {
    Life::fill(*harmed_, 9);
    life_->inject(fault, Direction::read, *harmed_);
    return life_->read(*harmed_);
  }
  void expect_read(Life::Object& object, int value) {
    Life::fill(object, 9);
    EXPECT_EQ(life_->read(object), nullptr);
    EXPECT_TRUE(Life::is_filled(object, value));
  }
  /// After a write that failed: only that block is reported, the rest of the store is as it was, the object can be
  /// written again, and a store that is closed now opens again.
  void expect_harmed_block_alone() {
    EXPECT_EQ(harmed_->failed_writes, std::vector{harmed_->places.nvme[faulty_block]});
    EXPECT_TRUE(is<LogicError>(life_->read(*harmed_))) << "half of it old, half of it new: it is never served";
    expect_nothing_else_harmed();
  }
  void expect_nothing_else_harmed() {
    life_->heal();
    expect_read(*other_, 2);
    Life::fill(*harmed_, 4);
    EXPECT_EQ(life_->write(*harmed_), nullptr);
    expect_read(*harmed_, 4);
    expect_to_open_again();
  }
  void expect_to_open_again() {
    life_.reset();
    EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
    life_.emplace(GetParam(), folder_.path());
    Life::Object& fresh = life_->object();
    Life::fill(fresh, 5);
    EXPECT_EQ(life_->write(fresh), nullptr);
    expect_read(fresh, 5);
  }

  TemporaryFolder folder_;
  std::optional<Life> life_;
  Life::Object* harmed_ = nullptr;
  Life::Object* other_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(On, FaultCatalogue, testing::Values("threads", "io_uring"),
                         [](const auto& engine) { return std::string(engine.param); });

TEST_P(FaultCatalogue, an_input_output_error_of_a_write_is_its_own) {
  EXPECT_TRUE(is<IoError>(faulty_write(Fault::io_error)));
  expect_harmed_block_alone();
}

TEST_P(FaultCatalogue, a_full_disk_fails_the_write_that_met_it) {
  EXPECT_TRUE(is<IoError>(faulty_write(Fault::no_space)));
  expect_harmed_block_alone();
}

TEST_P(FaultCatalogue, a_short_write_is_an_error) {
  EXPECT_TRUE(is<IoError>(faulty_write(Fault::short_transfer)));
  expect_harmed_block_alone();
}

TEST_P(FaultCatalogue, a_torn_write_that_nobody_told_of_is_found_when_it_is_read) {
  EXPECT_EQ(faulty_write(Fault::torn), nullptr);
  EXPECT_TRUE(is<CorruptData>(life_->read(*harmed_)));
  expect_nothing_else_harmed();
}

TEST_P(FaultCatalogue, a_bit_flipped_on_its_way_to_the_drive_is_found_when_it_is_read) {
  EXPECT_EQ(faulty_write(Fault::flipped_bit), nullptr);
  EXPECT_TRUE(is<CorruptData>(life_->read(*harmed_)));
  expect_nothing_else_harmed();
}

TEST_P(FaultCatalogue, a_slow_or_late_write_is_only_slow) {
  for (const Fault fault : {Fault::slow, Fault::late}) {
    EXPECT_EQ(faulty_write(fault), nullptr);
    expect_read(*harmed_, 3);
    life_->heal();
  }
  expect_nothing_else_harmed();
}

TEST_P(FaultCatalogue, an_input_output_error_of_a_read_is_its_own_and_the_bytes_can_be_read_again) {
  EXPECT_TRUE(is<IoError>(faulty_read(Fault::io_error)));
  life_->heal();
  expect_read(*harmed_, 1);
  expect_nothing_else_harmed();
}

TEST_P(FaultCatalogue, a_short_read_is_an_error_and_the_bytes_can_be_read_again) {
  EXPECT_TRUE(is<IoError>(faulty_read(Fault::short_transfer)));
  life_->heal();
  expect_read(*harmed_, 1);
  expect_nothing_else_harmed();
}

TEST_P(FaultCatalogue, a_torn_read_is_found_and_the_bytes_can_be_read_again) {
  EXPECT_TRUE(is<CorruptData>(faulty_read(Fault::torn)));
  life_->heal();
  expect_read(*harmed_, 1);
  expect_nothing_else_harmed();
}

TEST_P(FaultCatalogue, a_bit_flipped_on_its_way_from_the_drive_is_found_and_the_bytes_can_be_read_again) {
  EXPECT_TRUE(is<CorruptData>(faulty_read(Fault::flipped_bit)));
  life_->heal();
  expect_read(*harmed_, 1);
  expect_nothing_else_harmed();
}

TEST_P(FaultCatalogue, a_slow_or_late_read_is_only_slow) {
  for (const Fault fault : {Fault::slow, Fault::late}) {
    EXPECT_EQ(faulty_read(fault), nullptr);
    EXPECT_TRUE(Life::is_filled(*harmed_, 1));
    life_->heal();
  }
  expect_nothing_else_harmed();
}

TEST_P(FaultCatalogue, a_read_that_is_stuck_is_given_up_and_what_was_written_before_can_still_be_written) {
  EXPECT_TRUE(is<Unanswered>(faulty_read(Fault::stuck)));
  life_->heal();
  EXPECT_TRUE(is<IoError>(life_->read(*other_))) << "nothing more is asked of that drive this way";
  Life::fill(*other_, 6);
  EXPECT_EQ(life_->write(*other_), nullptr) << "the other way goes on";
  expect_to_open_again();
}

TEST_P(FaultCatalogue, a_write_that_is_stuck_is_given_up_and_what_was_written_before_can_still_be_read) {
  EXPECT_TRUE(is<Unanswered>(faulty_write(Fault::stuck)));
  life_->heal();
  EXPECT_TRUE(is<IoError>(life_->write(*other_))) << "nothing more is asked of that drive this way";
  expect_read(*other_, 2);
  EXPECT_TRUE(is<LogicError>(life_->read(*harmed_))) << "nobody knows what it holds";
  expect_to_open_again();
}

TEST_P(FaultCatalogue, the_death_of_the_reading_queue_frees_who_waits_and_writing_goes_on) {
  EXPECT_TRUE(is<Unanswered>(faulty_read(Fault::dead_queue)));
  EXPECT_TRUE(is<IoError>(life_->read(*other_)));
  Life::fill(*other_, 6);
  EXPECT_EQ(life_->write(*other_), nullptr);
  expect_to_open_again();
}

TEST_P(FaultCatalogue, the_death_of_the_writing_queue_frees_who_waits_and_reading_goes_on) {
  EXPECT_TRUE(is<Unanswered>(faulty_write(Fault::dead_queue)));
  EXPECT_TRUE(is<IoError>(life_->write(*other_)));
  expect_read(*other_, 2);
  expect_to_open_again();
}

}  // namespace
}  // namespace terrace
