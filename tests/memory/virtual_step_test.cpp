/// How near a training step comes to its floor, in time and in bytes, by the policy's schedule alone.

#include "tests/memory/virtual_step.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace terrace {
namespace {

enum class Bound { computation, link, nvme, all };

/// What a step is bound by, where its parameters rest, and the most that it may show.
struct Case {
  const char* name;
  Bound bound;
  double nvme_share;
  int micro_batches;
  double most_seconds;  ///< of its floor
  double most_bytes;    ///< of the least necessary, on each link
};

std::ostream& operator<<(std::ostream& out, const Case& of) { return out << of.name; }

/// What one part of a step cannot do without. Nothing of an update can begin before step(), gradients come in backward,
/// and the first forward reads what the update makes: so none of it can be moved in another part, but for what the
/// device and the host have room to keep over the turn between two, at which the order of use reverses. Gradients are
/// taken to leave the device in backward. The policy keeps some of them there for the update, so that a step can be
/// below this floor, and move fewer bytes than these.
struct Phase {
  double compute_share = 0;
  double update_seconds = 0;
  std::array<double, link_count> chunks{};
};

std::vector<Phase> phases_of(const VirtualStep::Options& step) {
  const auto all = static_cast<double>(step.parameter_chunks);
  const auto host = static_cast<double>(step.host_chunks);
  const double over_turn = all - static_cast<double>(step.device_chunks - 1);  // but for a gradient that is made
  const double parameters_over_turn = std::max(0.0, step.nvme_share * over_turn - host);
  const double gradients_over_turn = std::max(0.0, all - host);
  std::vector<Phase> phases;
  for (int i = 0; i < step.micro_batches; ++i) {
    Phase forward{.compute_share = 1.0 / 3 / step.micro_batches};
    Phase backward{.compute_share = 2.0 / 3 / step.micro_batches};
    // In the order of the links: from NVMe, to it, to the device, from it.
    if (i == 0) {  // the update reads gradients and parameters, and writes parameters
      const double parameters = step.nvme_share * all;
      forward.update_seconds = step.update_seconds;
      forward.chunks = {gradients_over_turn + parameters, parameters, all, 0};
      backward.chunks = {parameters_over_turn, gradients_over_turn, over_turn, all};
    } else {  // what is added to comes too
      forward.chunks = {parameters_over_turn, 0, over_turn, 0};
      backward.chunks = {parameters_over_turn + gradients_over_turn, gradients_over_turn, over_turn + all, all};
    }
    phases.push_back(forward);
    phases.push_back(backward);
  }
  return phases;
}

double on(const Phase& phase, Link link) { return phase.chunks[index_of(link)]; }

double least_bytes(const std::vector<Phase>& phases, Link link) {
  double chunks = 0;
  for (const Phase& phase : phases) chunks += on(phase, link);
  return chunks * VirtualStep::chunk_bytes;
}

double floor_seconds(const VirtualStep::Options& step) {
  const double link_chunks_per_second = step.links.link_bytes_per_second / VirtualStep::chunk_bytes;
  const double drive_chunks_per_second = step.links.drive_bytes_per_second / VirtualStep::chunk_bytes;
  double seconds = 0;
  for (const Phase& phase : phases_of(step)) {
    const double drive_chunks = on(phase, Link::nvme_to_host) + on(phase, Link::host_to_nvme);
    const double link_chunks = std::max(on(phase, Link::host_to_device), on(phase, Link::device_to_host));
    seconds += std::max({phase.compute_share * step.compute_seconds, phase.update_seconds,
                         link_chunks / link_chunks_per_second, drive_chunks / drive_chunks_per_second});
  }
  return seconds;
}

/// A step for which what it is bound by takes a second, if it never pauses, and the rest two thirds of that; where all
/// bind, the links take a little less than computation. A seventh of the parameters fits on the device.
VirtualStep::Options step_of(Bound bound, double nvme_share, int micro_batches = 1, std::size_t host_chunks = 8) {
  VirtualStep::Options step{.parameter_chunks = 72,
                            .device_chunks = 10,
                            .host_chunks = host_chunks,
                            .nvme_share = nvme_share,
                            .micro_batches = micro_batches,
                            .update_seconds = 0.2};
  const auto seconds = [&](Bound part, double where_all) {
    return bound == part ? 1.0 : bound == Bound::all ? where_all : 0.65;
  };
  const std::vector<Phase> phases = phases_of(step);
  const double nvme_bytes = least_bytes(phases, Link::nvme_to_host) + least_bytes(phases, Link::host_to_nvme);
  step.compute_seconds = seconds(Bound::computation, 1);
  step.links.link_bytes_per_second =
      std::max(least_bytes(phases, Link::host_to_device), least_bytes(phases, Link::device_to_host)) /
      seconds(Bound::link, 0.92);
  step.links.drive_bytes_per_second = nvme_bytes / seconds(Bound::nvme, 0.92);
  return step;
}

double times_its_floor(const VirtualStep::Options& step) {
  return VirtualStep(step).measure().seconds / floor_seconds(step);
}

class VirtualSteps : public testing::TestWithParam<Case> {};

TEST_P(VirtualSteps, take_little_longer_than_their_floor_and_move_little_more_than_they_must) {
  const VirtualStep::Options step = step_of(GetParam().bound, GetParam().nvme_share, GetParam().micro_batches);
  const std::vector<Phase> phases = phases_of(step);
  const VirtualStep::Measured measured = VirtualStep(step).measure();
  EXPECT_LE(measured.seconds / floor_seconds(step), GetParam().most_seconds);
  for (const Link link : all_links) {
    EXPECT_LE(measured.bytes[index_of(link)] / least_bytes(phases, link), GetParam().most_bytes) << name_of(link);
  }
}

constexpr Case kCases[] = {
    {"by_computation_with_parameters_on_host", Bound::computation, 0, 1, 1.02, 1.05},
    {"by_links_with_parameters_on_host", Bound::link, 0, 1, 0.99, 1.04},
    {"by_nvme_with_parameters_on_host", Bound::nvme, 0, 1, 0.99, 1.04},
    {"by_all_with_parameters_on_host", Bound::all, 0, 1, 1.01, 1.04},
    {"by_computation_with_parameters_on_nvme", Bound::computation, 1, 1, 1.01, 1.05},
    {"by_links_with_parameters_on_nvme", Bound::link, 1, 1, 0.99, 1.05},
    {"by_nvme_with_parameters_on_nvme", Bound::nvme, 1, 1, 1.00, 1.05},
    {"by_all_with_parameters_on_nvme", Bound::all, 1, 1, 1.00, 1.05},
    {"by_computation_with_half_on_nvme", Bound::computation, 0.5, 1, 1.00, 1.05},
    {"by_links_with_half_on_nvme", Bound::link, 0.5, 1, 0.99, 1.05},
    {"by_nvme_with_half_on_nvme", Bound::nvme, 0.5, 1, 1.02, 1.05},
    {"by_all_with_half_on_nvme", Bound::all, 0.5, 1, 1.00, 1.05},
    {"by_computation_in_four_micro_batches", Bound::computation, 0, 4, 1.01, 1.05},
    {"by_links_in_four_micro_batches", Bound::link, 0, 4, 1.04, 1.05},
    {"by_nvme_in_four_micro_batches", Bound::nvme, 0, 4, 1.00, 1.05},
    {"by_all_in_four_micro_batches", Bound::all, 0, 4, 1.00, 1.05},
};

INSTANTIATE_TEST_SUITE_P(Bound, VirtualSteps, testing::ValuesIn(kCases),
                         [](const testing::TestParamInfo<Case>& of) { return std::string(of.param.name); });

TEST(VirtualStep, takes_little_longer_in_micro_batches_however_much_of_the_gradients_the_host_has_room_for) {
  for (const std::size_t host_chunks : {4, 24, 48}) {
    for (const Bound bound : {Bound::computation, Bound::link, Bound::nvme, Bound::all}) {
      EXPECT_LE(times_its_floor(step_of(bound, 0, 4, host_chunks)), 1.07)
          << host_chunks << " of 72, case " << static_cast<int>(bound);
    }
  }
}

TEST(VirtualStep, reads_little_more_than_it_must_in_micro_batches_of_which_the_states_rest_on_nvme) {
  constexpr int micro_batches = 4;
  for (const std::size_t host_chunks : {16, 40}) {
    VirtualStep::Options step = step_of(Bound::all, 0, micro_batches, host_chunks);
    step.states_on_nvme = true;
    const std::size_t gradients_not_on_host = step.parameter_chunks - host_chunks;
    const std::size_t least = 2 * step.parameter_chunks + micro_batches * gradients_not_on_host;
    const double read = VirtualStep(step).measure().bytes[index_of(Link::nvme_to_host)] / VirtualStep::chunk_bytes;
    EXPECT_LE(read / static_cast<double>(least), 1.2) << host_chunks << " of 72";
  }
}

/// Why staging is sized as it is (see integration/memory_plan.cpp). What leaves the device for NVMe holds its staging
/// while it waits behind the reads that the drive was given before. Where there are few blocks of it, the link from the
/// device stands still meanwhile, and with it what is to come into the room that would become free.
TEST(VirtualStep, takes_longer_where_few_blocks_can_wait_for_the_drive) {
  VirtualStep::Options step = step_of(Bound::link, 1);
  const double with_many = times_its_floor(step);
  step.links.staging_blocks_each_way = 4;
  EXPECT_GT(times_its_floor(step), 1.06 * with_many);
}

/// A step of a second on a drive that answers 8 ms late.
VirtualStep::Options step_on_late_drive(int micro_batches) {
  VirtualStep::Options step = step_of(Bound::nvme, micro_batches == 1 ? 1 : 0, micro_batches);
  step.links.drive_latency_seconds = 0.008;
  step.links.drive_depth = 128;
  step.links.staging_blocks_each_way = 80;
  return step;
}

/// Why the queues of a drive are as deep as they are, and staging as large: see NvmeWorker and memory_plan.cpp.
TEST(VirtualStep, takes_little_longer_on_a_drive_that_answers_late) {
  EXPECT_LE(times_its_floor(step_on_late_drive(1)), 1.08);
  EXPECT_LE(times_its_floor(step_on_late_drive(4)), 1.15);
}

TEST(VirtualStep, takes_longer_on_a_drive_that_answers_late_with_half_the_queue_and_staging) {
  for (const int micro_batches : {1, 4}) {
    VirtualStep::Options step = step_on_late_drive(micro_batches);
    step.links.drive_depth /= 2;
    step.links.staging_blocks_each_way /= 2;
    EXPECT_GT(times_its_floor(step), micro_batches == 1 ? 1.12 : 1.5);
  }
}

TEST(VirtualStep, takes_much_longer_where_nothing_is_brought_ahead_of_need) {
  for (const double nvme_share : {0, 1}) {
    VirtualStep::Options step = step_of(Bound::all, nvme_share);
    step.prefetch_depth = 0;
    EXPECT_GT(times_its_floor(step), 1.4);
  }
}

}  // namespace
}  // namespace terrace
