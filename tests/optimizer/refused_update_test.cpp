// What becomes of a job whose gradients are not finite, and what is told of norms.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "optimizer/non_finite.h"
#include "optimizer/update_queue.h"
#include "tests/optimizer/update_world.h"

namespace terrace {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

enum class Poison { nan, infinity };

class RefusedUpdates : public testing::TestWithParam<bool> {
 protected:
  RefusedUpdates() {
    world_.add_sets(4);
    queue_.emplace(world_.world.stream, /*background=*/GetParam(), 2);
  }

  /// An element of one set's gradient is not finite.
  void poison(std::uint32_t index, Poison how) {
    TestSet& set = world_.sets[index];
    std::visit(
        [&](auto& gradient) {
          using Lane = std::decay_t<decltype(gradient[0])>;
          if constexpr (std::is_same_v<Lane, float>) {
            gradient[1200] =
                how == Poison::nan ? std::numeric_limits<float>::quiet_NaN() : -std::numeric_limits<float>::infinity();
          } else {
            gradient[1200] = how == Poison::nan ? 0x7fc0 : 0xff80;
          }
        },
        set.gradient);
    world_.write(*set.chunks.gradient, set.gradient_bytes());
  }
  UpdateJob job(NonFinite policy, std::int64_t step = 1) {
    UpdateJob job = world_.job(step, not_clipping, world_.all());
    job.non_finite = policy;
    job.step = step;
    job.report = report_;
    return job;
  }

  UpdateWorld world_{roomy};
  std::optional<UpdateQueue> queue_;
  const std::shared_ptr<GradientReport> report_ = std::make_shared<GradientReport>();
};

INSTANTIATE_TEST_SUITE_P(Updates, RefusedUpdates, testing::Bool(),
                         [](const auto& test) { return test.param ? "in_background" : "when_needed"; });

TEST_P(RefusedUpdates, have_no_part_in_the_norm_of_a_job_without_segments_which_the_next_job_does_not_lose) {
  UpdateJob empty = world_.job(1, not_clipping, {});
  empty.non_finite = NonFinite::skip;
  const UpdateTicket first = queue_->submit(std::move(empty));
  queue_->submit(job(NonFinite::skip));
  EXPECT_EQ(queue_->norm(first), 0.0);
}

TEST_P(RefusedUpdates, change_no_bit_and_no_count_and_let_go_of_gradients) {
  for (const Poison how : {Poison::nan, Poison::infinity}) {
    for (const std::uint32_t index : world_.all()) {
      poison(index, how);
      UpdateJob skipped = job(NonFinite::skip);
      std::vector<std::shared_ptr<std::int64_t>> counts;
      std::vector<std::weak_ptr<const void>> gradients;
      for (Segment& segment : skipped.segments) {
        *segment.updates = 7;
        counts.push_back(segment.updates);
        segment.gradient = std::make_shared<int>();
        gradients.push_back(segment.gradient);
      }
      const std::int64_t skipped_before = report_->skipped();
      const UpdateTicket ticket = queue_->submit(std::move(skipped));
      EXPECT_TRUE(world_.is_current(world_.sets[0], AccessOrigin::program));
      queue_->finish();
      EXPECT_EQ(world_.current(), world_.all()) << "as they were";
      for (const auto& count : counts) EXPECT_EQ(*count, 7);
      for (const auto& gradient : gradients) EXPECT_TRUE(gradient.expired());
      EXPECT_EQ(report_->skipped(), skipped_before + 1);
      EXPECT_FALSE(std::isfinite(queue_->norm(ticket).value()));
      world_.write_gradient(world_.sets[index]);
    }
  }
}

TEST_P(RefusedUpdates, leave_the_next_job_as_if_they_had_not_been) {
  poison(1, Poison::nan);
  queue_->submit(job(NonFinite::skip));
  world_.write_gradient(world_.sets[1]);
  queue_->submit(job(NonFinite::skip));
  queue_->finish();
  world_.update_arrays(1, not_clipping, world_.all());
  EXPECT_EQ(world_.current(), world_.all());
  EXPECT_EQ(report_->skipped(), 1);
}

TEST_P(RefusedUpdates, are_told_of_once_by_the_name_of_the_first_parameter_that_is_not_finite) {
  poison(3, Poison::nan);
  poison(2, Poison::infinity);
  queue_->submit(job(NonFinite::error, 5));
  try {
    queue_->finish();
    FAIL() << "nobody heard of it";
  } catch (const NonFiniteGradient& error) {
    EXPECT_THAT(error.what(), HasSubstr("step 5"));
    EXPECT_THAT(error.what(), HasSubstr("'set 2 from 1000'"));
  }
  EXPECT_NO_THROW(queue_->finish());
  EXPECT_NO_THROW(queue_->throw_refusal());
  EXPECT_EQ(world_.current(), world_.all()) << "as they were";
  EXPECT_EQ(report_->skipped(), 1);
}

TEST_P(RefusedUpdates, reach_who_submits_next_and_that_job_is_not_taken) {
  poison(0, Poison::nan);
  queue_->submit(job(NonFinite::error));
  EXPECT_THROW(queue_->submit(job(NonFinite::pass)), NonFiniteGradient);
  queue_->finish();
  EXPECT_EQ(world_.current(), world_.all()) << "as they were";
}

TEST_P(RefusedUpdates, stand_in_the_way_of_no_other_optimizer_s_job) {
  poison(0, Poison::nan);
  queue_->submit(job(NonFinite::error));
  UpdateJob other = world_.job(1, not_clipping, {2, 3});
  other.report = std::make_shared<GradientReport>();
  const GradientReport* const others_report = other.report.get();
  EXPECT_NO_THROW(queue_->submit(std::move(other)));
  EXPECT_NO_THROW(queue_->settle());
  world_.update_arrays(1, not_clipping, {2, 3});
  EXPECT_EQ(world_.current(), world_.all());
  EXPECT_NO_THROW(queue_->throw_refusal_of(others_report));
  EXPECT_THROW(queue_->throw_refusal_of(report_.get()), NonFiniteGradient);
  EXPECT_NO_THROW(queue_->finish());
}

TEST_P(RefusedUpdates, of_several_optimizers_are_told_of_one_after_the_other_or_taken_together) {
  const auto refuse_two = [&] {
    for (const std::uint32_t index : {1u, 2u}) {
      poison(index, Poison::nan);
      UpdateJob refused = world_.job(1, not_clipping, {index});
      refused.non_finite = NonFinite::error;
      refused.report = std::make_shared<GradientReport>();
      queue_->submit(std::move(refused));
    }
  };
  refuse_two();
  EXPECT_THROW(queue_->finish(), NonFiniteGradient);
  EXPECT_THROW(queue_->finish(), NonFiniteGradient);
  EXPECT_NO_THROW(queue_->finish());
  refuse_two();
  queue_->settle();
  EXPECT_EQ(queue_->take_refusals().size(), 2u);
  EXPECT_NO_THROW(queue_->finish());
  EXPECT_TRUE(queue_->take_refusals().empty());
}

TEST_P(RefusedUpdates, reach_who_asks_without_waiting_once_a_chunk_has_been_used) {
  EXPECT_NO_THROW(queue_->throw_refusal());
  poison(0, Poison::nan);
  queue_->submit(job(NonFinite::error));
  EXPECT_TRUE(world_.is_current(world_.sets[2], AccessOrigin::program)) << "uses are not refused";
  EXPECT_THROW(queue_->throw_refusal(), NonFiniteGradient);
}

TEST_P(RefusedUpdates, do_not_keep_the_queue_from_ending) {
  poison(0, Poison::nan);
  queue_->submit(job(NonFinite::error));
  queue_.reset();
  EXPECT_EQ(world_.current(), world_.all()) << "as they were";
}

TEST_P(RefusedUpdates, are_none_where_gradients_are_finite) {
  UpdateJob taken = job(NonFinite::error);
  const std::shared_ptr<std::int64_t> count = taken.segments[3].updates;
  queue_->submit(std::move(taken));
  queue_->finish();
  world_.update_arrays(1, not_clipping, world_.all());
  EXPECT_EQ(world_.current(), world_.all());
  EXPECT_EQ(*count, 1);
  EXPECT_EQ(report_->skipped(), 0);
}

TEST_P(RefusedUpdates, are_none_where_what_is_not_finite_passes) {
  poison(1, Poison::nan);
  queue_->submit(job(NonFinite::pass));
  queue_->finish();
  EXPECT_FALSE(world_.is_current(world_.sets[0]));
  EXPECT_FALSE(world_.is_current(world_.sets[1]));
}

TEST_P(RefusedUpdates, and_others_tell_their_norms_by_group_without_being_waited_for) {
  EXPECT_FALSE(report_->newest().has_value());
  UpdateJob both = job(NonFinite::skip, 3);
  both.groups = 3;
  std::vector<double> first, second;
  for (std::size_t i = 0; i < both.segments.size(); ++i) {
    both.segments[i].group = i < 2 ? 0 : 2;
    TestSet& set = world_.sets[i / 2];
    const auto [from, to] = set.runs()[i % 2];
    const UpdateRun run = set.run(from, to);
    (i < 2 ? first : second).push_back(sum_of_squares(run.gradient_type, run.gradient, run.count, UpdateThreads(1)));
  }
  const UpdateTicket ticket = queue_->submit(std::move(both));
  queue_->finish();
  const GradientNorms norms = report_->newest().value();
  EXPECT_EQ(norms.step, 3);
  EXPECT_EQ(norms.all, queue_->norm(ticket).value());
  EXPECT_THAT(norms.by_group, ElementsAre(combined_norm(first), 0.0, combined_norm(second)));
  EXPECT_FALSE(norms.skipped);
}

TEST_P(RefusedUpdates, and_others_judge_and_clip_what_the_loss_scale_leaves) {
  UpdateJob scaled = job(NonFinite::skip);
  scaled.loss_scale = 1024;
  scaled.max_gradient_norm = clipping;
  const UpdateTicket ticket = queue_->submit(std::move(scaled));
  const double norm = queue_->norm(ticket).value();
  queue_->finish();
  std::vector<double> sums;
  for (TestSet& set : world_.sets) {
    for (const auto& [from, to] : set.runs()) {
      const UpdateRun run = set.run(from, to);
      sums.push_back(sum_of_squares(run.gradient_type, run.gradient, run.count, UpdateThreads(1)));
    }
  }
  EXPECT_EQ(norm, combined_norm(sums) / 1024);
  const float scale = clip_coefficient(norm, clipping) / 1024;
  for (TestSet& set : world_.sets) {
    for (const auto& [from, to] : set.runs()) adamw_update(AdamWStep(set.options(), 1, scale), set.run(from, to));
  }
  EXPECT_EQ(world_.current(), world_.all());
}

TEST(NonFiniteByName, is_refused_under_another_name) {
  EXPECT_EQ(non_finite("pass"), NonFinite::pass);
  EXPECT_EQ(non_finite("skip"), NonFinite::skip);
  EXPECT_EQ(non_finite("error"), NonFinite::error);
  EXPECT_THROW(non_finite("ignore"), ConfigError);
}

// ---- Jobs behind one another

class AddedUpdates : public testing::TestWithParam<bool> {
 protected:
  AddedUpdates() { world_.add_sets(6); }
  UpdateWorld world_{scarce, Tier::nvme};
};

INSTANTIATE_TEST_SUITE_P(Updates, AddedUpdates, testing::Bool(),
                         [](const auto& test) { return test.param ? "in_background" : "when_needed"; });

TEST_P(AddedUpdates, are_those_of_one_job_of_all) {
  UpdateQueue queue(world_.world.stream, GetParam(), 2);
  for (std::int64_t step = 1; step <= 3; ++step) {
    for (const std::uint32_t index : {5u, 4u, 3u, 2u, 1u, 0u}) queue.add(world_.job(step, not_clipping, {index}));
    world_.update_arrays(step, not_clipping, world_.all());
    for (TestSet& set : world_.sets) {
      EXPECT_TRUE(world_.is_current(set, AccessOrigin::program)) << "set " << set.index << ", step " << step;
      world_.write_gradient(set);
    }
  }
}

TEST_P(AddedUpdates, leave_few_gradients_at_a_time) {
  UpdateQueue queue(world_.world.stream, GetParam(), 2);
  std::vector<std::weak_ptr<const void>> gradients;
  for (const std::uint32_t index : world_.all()) {
    UpdateJob job = world_.job(1, not_clipping, {index});
    for (Segment& segment : job.segments) segment.gradient = std::make_shared<int>();
    gradients.emplace_back(job.segments[0].gradient);
    queue.add(std::move(job));
    queue.keep_few();
    const auto alive =
        std::count_if(gradients.begin(), gradients.end(), [](const auto& each) { return !each.expired(); });
    EXPECT_LE(alive, GetParam() ? 2 : 0);
  }
}

TEST_P(AddedUpdates, of_the_same_set_wait_for_one_another) {
  UpdateQueue queue(world_.world.stream, GetParam(), 2);
  queue.add(world_.job(1, not_clipping, {0, 1}));
  queue.add(world_.job(2, not_clipping, {1}));
  queue.finish();
  world_.update_arrays(1, not_clipping, {0, 1});
  world_.update_arrays(2, not_clipping, {1});
  EXPECT_EQ(world_.current(), world_.all());
}

TEST_P(AddedUpdates, go_on_behind_a_job_that_needs_a_norm) {
  UpdateQueue queue(world_.world.stream, GetParam(), 2);
  queue.submit(world_.job(1, clipping, {0, 1, 2}));
  world_.update_arrays(1, clipping, {0, 1, 2});
  queue.add(world_.job(1, not_clipping, {3, 4}));
  world_.update_arrays(1, not_clipping, {3, 4});
  EXPECT_TRUE(world_.is_current(world_.sets[4], AccessOrigin::program));
  queue.submit(world_.job(2, clipping, {4, 5}));
  world_.update_arrays(2, clipping, {4, 5});
  queue.finish();
  EXPECT_EQ(world_.current(), world_.all());
}

}  // namespace
}  // namespace terrace
