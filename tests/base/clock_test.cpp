#include "base/clock.h"

#include <chrono>
#include <thread>

#include <gtest/gtest.h>

namespace terrace {
namespace {

constexpr std::int64_t kNapNs = 2'000'000;

void nap() { std::this_thread::sleep_for(std::chrono::nanoseconds(kNapNs)); }

TEST(Clock, never_goes_back) {
  std::int64_t last = monotonic_ns();
  for (int round = 0; round < 1000; ++round) {
    const std::int64_t now = monotonic_ns();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(Stopwatch, counts_nanoseconds_and_seconds_from_its_start) {
  const std::int64_t before = monotonic_ns();
  const Stopwatch stopwatch;
  nap();
  const std::int64_t elapsed = stopwatch.elapsed_ns();
  EXPECT_GE(elapsed, kNapNs);
  EXPECT_LE(elapsed, monotonic_ns() - before);
  const double seconds = stopwatch.elapsed_seconds();
  EXPECT_GE(seconds, static_cast<double>(elapsed) * 1e-9);
  EXPECT_LE(seconds, static_cast<double>(monotonic_ns() - before) * 1e-9);
}

TEST(Stopwatch, restart_forgets_what_was) {
  Stopwatch stopwatch;
  nap();
  const std::int64_t before = monotonic_ns();
  stopwatch.restart();
  const std::int64_t elapsed = stopwatch.elapsed_ns();
  EXPECT_LE(elapsed, monotonic_ns() - before);
}

}  // namespace
}  // namespace terrace
