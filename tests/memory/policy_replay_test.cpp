/// Random events through the policy machine, with its invariants and a model of the contents checked after each.
///
/// TERRACE_TEST_SEED repeats a run.

#include <algorithm>
#include <array>
#include <cstdint>
#include <iostream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "memory/policy.h"
#include "tests/memory/seed.h"
#include "tests/memory/simulated_driver.h"

namespace terrace {
namespace {

using Call = SimulatedDriver::Call;

constexpr int events_in_all = 100'000;
constexpr std::uint64_t unit = 1024;

/// Budgets in units; chunks take 1 to 4 of them.
struct Setting {
  const char* name;
  std::array<std::uint64_t, tier_count> capacity;
  std::uint64_t device_chunk_limit;
  std::size_t prefetch_depth;
};

const std::vector<Setting> settings{
    {"roomy", {400, 600, 600}, 400, 4},
    {"tight device", {24, 300, 300}, 24, 3},
    {"tight device, nothing ahead of need", {24, 300, 300}, 24, 0},
    {"tight device and host", {24, 40, 300}, 20, 2},
    {"few chunks allowed on the device", {80, 120, 300}, 12, 8},
    {"no nvme", {30, 200, 0}, 30, 1},
};

class Replay {
 public:
  Replay(const Setting& setting, std::uint64_t seed, bool write_backs_fail)
      : driver_({setting.capacity[0] * unit, setting.capacity[1] * unit, setting.capacity[2] * unit},
                setting.device_chunk_limit * unit, setting.prefetch_depth),
        random_(seed),
        write_backs_fail_(write_backs_fail) {
    for (int i = 0; i < 30; ++i) add_chunk();
  }

  /// Goes on for `events` events or until the machine has failed. Returns how many there were.
  int run(int events) {
    for (int event = 0; event < events; ++event) {
      if (failed_) return event;
      one_event();
      look_at_verdicts();
      if (event % 1000 == 999) nobody_waits_once_transfers_are_done();
    }
    return events;
  }

  /// Nothing is left to wait for; every chunk can still be read, with its newest contents.
  void finish() {
    nobody_waits_once_transfers_are_done();
    while (!granted_.empty()) release_one();
    driver_.run();
    for (const ChunkId chunk : chunks_) {
      if (failed_) break;
      const Tier home = driver_.policy().chunk(chunk).info().home;
      Call& call = driver_.acquire({{chunk, home == Tier::device ? Tier::device : Tier::host, Access::read}});
      driver_.run();
      // Homes may leave no room to work in; everything else fits now.
      if (call.granted()) {
        driver_.release(call);
        ++read_at_the_end_;
      } else {
        EXPECT_TRUE(call.refused_with<OutOfMemory>()) << call.error_text();
        driver_.forget(call);
      }
    }
    driver_.policy().check_invariants();
  }

  std::uint64_t hash() const { return hash_; }
  bool failed() const { return failed_; }
  const std::map<std::string, int>& seen() const { return seen_; }
  int read_at_the_end() const { return read_at_the_end_; }

 private:
  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }
  bool chance(std::uint64_t in_thousand) { return below(1000) < in_thousand; }
  void note(std::uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001b3; }

  void one_event() {
    while (!try_event()) {
    }
    seen_["wanted on its way"] += static_cast<int>(driver_.take_urgent().size());
    for (const Action& action : driver_.take_actions()) {
      note(static_cast<std::uint64_t>(action.what) << 48 | std::uint64_t{action.chunk} << 16 |
           index_of(action.from) << 8 | index_of(action.to));
      ++seen_[action.what == Action::What::move ? "move" : action.what == Action::What::fill ? "fill" : "vacate"];
    }
  }

  /// False where the event that was drawn cannot happen now.
  bool try_event() {
    const std::uint64_t choice = below(1000);
    const bool may_ask = waiting_.size() < 5 && granted_.size() < 6;
    if (choice < 100) return may_ask && acquire();
    if (choice < 250) return may_ask && go_on_in_the_program();
    if (choice < 300) return may_ask && allocate();
    if (choice < 500) return !granted_.empty() && release_one();
    if (choice < 505) return driver_.discard(random_chunk()), true;
    if (choice < 510) return driver_.step_mark(), true;
    if (choice < 511) return chunks_.size() < 60 && add_chunk();
    if (choice < 514) return driver_.begin_pass(below(3)), true;
    if (choice < 518) return announce();
    if (choice < 540) return driver_.set_update_queued(random_chunk(), chance(300)), true;
    if (choice < 541) return chunks_.size() > 20 && remove_chunk();
    if (choice < 560) return driver_.set_read_on_arrival(random_chunk(), chance(900)), true;
    if (choice < 563) return driver_.set_readers_begin(chance(500)), true;
    if (choice < 600) return end_reading();
    if (choice < 680) return report_vacate();
    return !driver_.in_flight().empty() && end_transfer();
  }

  ChunkId random_chunk() { return chunks_[below(chunks_.size())]; }

  bool remove_chunk() {
    const std::size_t position = below(chunks_.size());
    const ChunkId chunk = chunks_[position];
    chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(position));
    std::erase_if(program_, [&](const ChunkAccess& access) { return access.chunk == chunk; });
    program_position_ = std::min(program_position_, program_.size());
    driver_.remove(chunk);
    ++seen_["chunk removed"];
    return true;
  }

  bool add_chunk() {
    const std::uint64_t bytes = (1 + below(4)) * unit - below(unit);
    const std::uint64_t room = (bytes + unit - 1) / unit * unit;
    const std::uint64_t choice = below(10);
    const Tier home = choice < 1 ? Tier::device : choice < 6 ? Tier::host : Tier::nvme;
    const std::size_t before = driver_.policy().chunk_count();
    try {
      chunks_.push_back(
          driver_.add_chunk({.kind = all_kinds[below(5)],
                             .index = static_cast<std::uint32_t>(before),
                             .bytes = bytes,
                             .home = home,
                             // Granules of the host are larger than those of the device.
                             .room_bytes = {(bytes + unit / 2 - 1) / (unit / 2) * (unit / 2), room, room}}));
    } catch (const OutOfMemory&) {
      EXPECT_EQ(driver_.policy().chunk_count(), before);
      ++seen_["chunk refused"];
    }
    return true;
  }

  bool acquire() {
    std::vector<ChunkAccess> accesses(1 + below(4));
    for (ChunkAccess& access : accesses) {
      access.chunk = random_chunk();
      access.tier = chance(700) ? Tier::device : Tier::host;
      access.mode = chance(400) ? Access::write : Access::read;
    }
    waiting_.push_back(&driver_.acquire(std::move(accesses)));
    return true;
  }

  /// The next access of a program that repeats itself.
  bool go_on_in_the_program() {
    if (program_.empty()) {
      for (int i = 0; i < 40; ++i) {
        program_.push_back({random_chunk(), Tier::device, chance(300) ? Access::write : Access::read});
      }
    }
    if (program_position_ == program_.size()) {
      program_position_ = 0;
      driver_.step_mark();
      return true;
    }
    waiting_.push_back(&driver_.acquire({program_[program_position_++]}));
    return true;
  }

  bool announce() {
    std::vector<ChunkId> chunks(below(20));
    for (ChunkId& chunk : chunks) chunk = random_chunk();
    driver_.announce(std::move(chunks));
    return true;
  }

  bool allocate() {
    const std::uint64_t most = driver_.budget(Tier::device).capacity() / 4;
    waiting_.push_back(&driver_.allocate(1 + below(most), chance(500) ? Kind::buffer : Kind::other));
    return true;
  }

  bool release_one() {
    const std::size_t position = below(granted_.size());
    Call* call = granted_[position];
    granted_.erase(granted_.begin() + static_cast<std::ptrdiff_t>(position));
    driver_.release(*call);
    return true;
  }

  bool end_reading() {
    if (driver_.being_read().empty()) return false;
    driver_.end_reading(below(driver_.being_read().size()));
    ++seen_["read on the host"];
    return true;
  }

  bool report_vacate() {
    if (driver_.unreported_vacates() == 0) return false;
    driver_.report_vacate(below(driver_.unreported_vacates()));
    return true;
  }

  bool end_transfer() {
    const std::size_t position = below(driver_.in_flight().size());
    const Transfer transfer = driver_.in_flight()[position];
    const bool writes_back = driver_.writes_back(transfer);
    if (!chance(writes_back ? (write_backs_fail_ ? 100 : 0) : 30)) {
      driver_.finish(position);
      return true;
    }
    ++seen_[writes_back ? "failed write-back" : transfer.fill ? "failed fill" : "failed fetch"];
    failed_ = writes_back && driver_.failed_write_backs(transfer.chunk) == 1;  // this is the second
    const std::string text =
        "failure " + std::to_string(below(1'000'000)) + " of chunk " + std::to_string(transfer.chunk);
    if (failed_) last_error_ = text;
    driver_.fail(position, std::make_exception_ptr(IoError(text)));
    if (failed_) everything_is_refused();
    return true;
  }

  void look_at_verdicts() {
    for (std::size_t i = 0; i < waiting_.size();) {
      Call* call = waiting_[i];
      if (call->waiting()) {
        ++i;
        continue;
      }
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
      note(call->granted() ? 1 : 2);
      if (call->granted()) {
        ++seen_["granted"];
        granted_.push_back(call);
        continue;
      }
      const char* why = call->refused_with<OutOfMemory>()  ? "refused: no memory"
                        : call->refused_with<LogicError>() ? "refused: held elsewhere"
                        : call->refused_with<IoError>()    ? "refused: failure"
                                                           : "refused: unknown";
      ++seen_[why];
      driver_.forget(*call);
    }
  }

  void everything_is_refused() {
    for (const Call* call : waiting_) EXPECT_FALSE(call->waiting());
    Call& access = driver_.acquire({{random_chunk(), Tier::device, Access::read}});
    Call& tensor = driver_.allocate(1);
    for (Call* call : {&access, &tensor}) {
      EXPECT_TRUE(call->refused());
      EXPECT_EQ(call->error_text(), last_error_);
      driver_.forget(*call);
    }
  }

  void nobody_waits_once_transfers_are_done() {
    driver_.run();  // with all pins still held
    look_at_verdicts();
    EXPECT_TRUE(waiting_.empty());
    EXPECT_EQ(driver_.policy().waiting(), 0u);
  }

  SimulatedDriver driver_;
  std::vector<ChunkId> chunks_;  // that have not been removed
  std::mt19937_64 random_;
  const bool write_backs_fail_;
  std::vector<ChunkAccess> program_;
  std::size_t program_position_ = 0;
  std::vector<Call*> waiting_;
  std::vector<Call*> granted_;
  bool failed_ = false;
  std::string last_error_;
  std::uint64_t hash_ = 0xcbf29ce484222325;
  std::map<std::string, int> seen_;
  int read_at_the_end_ = 0;
};

/// What a whole replay of one setting did.
struct Outcome {
  std::uint64_t hash = 0;
  int machines_failed = 0;
  int read_at_the_end = 0;
  std::map<std::string, int> seen;
};

/// Runs `events` events, in a new machine whenever one has failed.
Outcome replay(const Setting& setting, std::uint64_t seed, int events, bool write_backs_fail) {
  SCOPED_TRACE(std::string(setting.name) + ", seed " + std::to_string(seed));
  Outcome outcome;
  try {
    for (int done = 0; done < events && !testing::Test::HasFailure();) {
      Replay run(setting, seed++, write_backs_fail);
      done += std::max(run.run(events - done), 1);
      run.finish();
      outcome.hash = outcome.hash * 31 + run.hash();
      outcome.machines_failed += run.failed() ? 1 : 0;
      outcome.read_at_the_end += run.read_at_the_end();
      for (const auto& [what, count] : run.seen()) outcome.seen[what] += count;
    }
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  return outcome;
}

TEST(PolicyReplay, invariants_and_contents_hold_through_100000_random_events) {
  const std::uint64_t seed = test_seed();
  std::map<std::string, int> seen;
  for (const Setting& setting : settings) {
    const Outcome outcome = replay(setting, seed, events_in_all / static_cast<int>(settings.size()), false);
    EXPECT_EQ(outcome.machines_failed, 0) << setting.name;
    EXPECT_GT(outcome.read_at_the_end, 0) << setting.name;
    for (const auto& [what, count] : outcome.seen) seen[what] += count;
  }
  // The events reached what they are meant to reach.
  for (const char* what :
       {"move", "fill", "vacate", "granted", "refused: no memory", "refused: held elsewhere", "refused: failure",
        "failed fetch", "failed fill", "wanted on its way", "chunk removed", "read on the host"}) {
    EXPECT_GT(seen[what], 0) << what;
  }
  EXPECT_EQ(seen["refused: unknown"], 0);
  for (const auto& [what, count] : seen) std::cout << "  " << what << ": " << count << "\n";
}

TEST(PolicyReplay, failing_write_backs_lose_nothing_and_the_second_in_a_row_stops_the_machine) {
  const std::uint64_t seed = test_seed();
  int failed = 0;
  int failures = 0;
  for (const Setting& setting : settings) {
    Outcome outcome = replay(setting, seed, events_in_all / 10, true);
    failed += outcome.machines_failed;
    failures += outcome.seen["failed write-back"];
  }
  EXPECT_GT(failed, 0);
  EXPECT_GT(failures, 2 * failed) << "most failures are survived";
}

TEST(PolicyReplay, the_same_events_have_the_same_actions) {
  const std::uint64_t seed = test_seed();
  for (const Setting& setting : settings) {
    const Outcome first = replay(setting, seed, 3000, true);
    const Outcome second = replay(setting, seed, 3000, true);
    EXPECT_EQ(first.hash, second.hash) << setting.name;
    EXPECT_EQ(first.seen, second.seen) << setting.name;
  }
}

}  // namespace
}  // namespace terrace
