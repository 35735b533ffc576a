#include "tools/step_phases.h"

#include <cstddef>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/memory/offline_optimum.h"

namespace terrace {
namespace {

double moved(const std::vector<StepPhase>& phases, Link link) { return bytes_of(phases)[index_of(link)]; }

TEST(StepPhases, of_parameters_on_the_host_cross_the_link_twice_less_what_the_device_keeps) {
  const auto phases = phases_of_step({.parameters = 100, .device_room = 30, .host_room = 20});
  ASSERT_EQ(phases.size(), 2u);
  EXPECT_EQ(moved(phases, Link::host_to_device), 170);
  EXPECT_EQ(moved(phases, Link::device_to_host), 100);
  EXPECT_EQ(moved(phases, Link::nvme_to_host), 80) << "gradients, less what the host keeps";
  EXPECT_EQ(moved(phases, Link::host_to_nvme), 80);
}

TEST(StepPhases, of_parameters_on_nvme_come_for_the_update_and_for_backward_and_go_once) {
  const auto phases = phases_of_step({.parameters = 100, .device_room = 30, .host_room = 20, .nvme_share = 1});
  EXPECT_EQ(moved(phases, Link::nvme_to_host), 80 + 100 + 50);
  EXPECT_EQ(moved(phases, Link::host_to_nvme), 80 + 100);
}

TEST(StepPhases, of_further_micro_batches_bring_gradients_back_to_be_added_to) {
  const auto phases = phases_of_step({.parameters = 100, .device_room = 30, .host_room = 20, .micro_batches = 2});
  ASSERT_EQ(phases.size(), 4u);
  EXPECT_EQ(moved(phases, Link::host_to_device), 170 + 70 + 170);
  EXPECT_EQ(moved(phases, Link::device_to_host), 200);
  EXPECT_EQ(moved(phases, Link::nvme_to_host), 160);
}

/// From a device that holds none of the chunks, to all bytes at home.
std::size_t fewest_transfers(const std::vector<OfflineEvent>& events, std::size_t chunks, int room) {
  const OfflineCopies none{std::vector<bool>(chunks), std::vector<bool>(chunks)};
  return OfflineOptimum(events, room, OfflineEnd::safe, none).fewest_from(0, OfflineOptimum::state_of(none));
}

/// Forward and backward over chunks that an update has made anew on the host.
std::vector<OfflineEvent> uses_of_parameters(std::size_t chunks) {
  std::vector<OfflineEvent> passes;
  for (std::size_t i = 0; i < chunks; ++i) passes.push_back({.chunk = i});
  for (std::size_t i = chunks; i-- > 0;) passes.push_back({.chunk = i});
  return passes;
}

/// And with gradients, which the next update wants on the host. They have as many chunks as parameters; each begins in
/// the first micro-batch and is added to in the others.
std::vector<OfflineEvent> uses_of_step(std::size_t chunks, int micro_batches) {
  std::vector<OfflineEvent> step;
  for (int batch = 0; batch < micro_batches; ++batch) {
    for (std::size_t i = 0; i < chunks; ++i) step.push_back({.chunk = i});
    for (std::size_t i = chunks; i-- > 0;) {
      step.push_back({.chunk = i});
      step.push_back({.chunk = chunks + i, .writes = true, .begins = batch == 0});
    }
  }
  return step;
}

TEST(StepPhases, bring_no_more_to_the_device_than_the_optimum_of_eviction_for_what_they_use) {
  for (std::size_t chunks = 2; chunks <= 12; ++chunks) {
    for (int room = 1; room < static_cast<int>(chunks); ++room) {
      const auto phases =
          phases_of_step({.parameters = static_cast<double>(chunks), .device_room = static_cast<double>(room)});
      EXPECT_EQ(moved(phases, Link::host_to_device),
                static_cast<double>(fewest_transfers(uses_of_parameters(chunks), chunks, room)))
          << chunks << " chunks, room for " << room;
    }
  }
}

TEST(StepPhases, move_as_much_to_and_from_the_device_as_the_optimum_of_eviction_for_what_they_use) {
  for (const auto& [most_chunks, micro_batches] : {std::pair<std::size_t, int>{8, 1}, {5, 2}, {4, 4}}) {
    for (std::size_t chunks = 2; chunks <= most_chunks; ++chunks) {
      // Room for a parameter and its gradient, and at most for all parameters.
      for (int room = 2; room <= static_cast<int>(chunks); ++room) {
        const auto phases = phases_of_step({.parameters = static_cast<double>(chunks),
                                            .device_room = static_cast<double>(room),
                                            .micro_batches = micro_batches});
        EXPECT_EQ(moved(phases, Link::host_to_device) + moved(phases, Link::device_to_host),
                  static_cast<double>(fewest_transfers(uses_of_step(chunks, micro_batches), 2 * chunks, room)))
            << chunks << " chunks, room for " << room << ", " << micro_batches << " micro-batches";
      }
    }
  }
}

TEST(StepPhases, each_take_their_largest_term) {
  const auto phases = phases_of_step({.parameters = 100});
  Terms terms;
  terms[Term::compute] = 3;
  terms[Term::host_to_device] = 3;
  terms[Term::device_to_host] = 1;
  EXPECT_DOUBLE_EQ(phased_floor_seconds(phases, terms), 1.5 + 2) << "the link in forward, computation in backward";
  terms[Term::cores] = 4;
  EXPECT_DOUBLE_EQ(phased_floor_seconds(phases, terms), 4) << "and no less than the largest of the whole";
}

}  // namespace
}  // namespace terrace
