#include "tools/step_phases.h"

#include <gtest/gtest.h>

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
