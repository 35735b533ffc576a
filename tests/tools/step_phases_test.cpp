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

/// Between device and host, of a step whose update has made all parameters anew on the host, so that none is on the
/// device at first, and wants all gradients there. Gradients have as many chunks as parameters; each begins in the
/// first micro-batch and is added to in the others.
std::size_t fewest_transfers(std::size_t chunks, int room, int micro_batches) {
  std::vector<OfflineEvent> step;
  for (int batch = 0; batch < micro_batches; ++batch) {
    for (std::size_t i = 0; i < chunks; ++i) step.push_back({.chunk = i});
    for (std::size_t i = chunks; i-- > 0;) {
      step.push_back({.chunk = i});
      step.push_back({.chunk = chunks + i, .writes = true, .begins = batch == 0});
    }
  }
  const OfflineCopies none{std::vector<bool>(2 * chunks), std::vector<bool>(2 * chunks)};
  return OfflineOptimum(step, room, OfflineEnd::safe, none).fewest_from(0, OfflineOptimum::state_of(none));
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
                  static_cast<double>(fewest_transfers(chunks, room, micro_batches)))
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
