#include "optimizer/update_queue.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/clock.h"
#include "tests/optimizer/update_world.h"

namespace terrace {
namespace {

using testing::ElementsAre;

// ---- Results, however they come about

class UpdateQueueResults : public testing::TestWithParam<std::tuple<bool, double, bool>> {
 protected:
  bool in_background() const { return std::get<0>(GetParam()); }
  double max_norm() const { return std::get<1>(GetParam()); }
  bool from_nvme() const { return std::get<2>(GetParam()); }
};

std::string named(const testing::TestParamInfo<std::tuple<bool, double, bool>>& test) {
  return std::string(std::get<0>(test.param) ? "in_background" : "when_needed") +
         (std::get<1>(test.param) > 0 ? "_clipped" : "") + (std::get<2>(test.param) ? "_from_nvme" : "");
}

INSTANTIATE_TEST_SUITE_P(Updates, UpdateQueueResults,
                         testing::Combine(testing::Bool(), testing::Values(not_clipping, clipping), testing::Bool()),
                         named);

TEST_P(UpdateQueueResults, are_those_of_an_update_of_plain_arrays_in_any_order_of_use) {
  UpdateWorld world(from_nvme() ? scarce : roomy, from_nvme() ? Tier::nvme : Tier::host);
  world.add_sets(6);
  UpdateQueue queue(world.world.stream, in_background(), 2);
  std::mt19937 random(1);
  std::vector<std::uint32_t> order = world.all();
  for (std::int64_t step = 1; step <= 4; ++step) {
    const UpdateTicket ticket = queue.submit(world.job(step, max_norm(), world.all()));
    const double norm = world.update_arrays(step, max_norm(), world.all());
    if (step == 2) std::reverse(order.begin(), order.end());
    if (step > 2) std::shuffle(order.begin(), order.end(), random);
    for (const std::uint32_t index : order) {
      EXPECT_TRUE(world.is_current(world.sets[index], AccessOrigin::program)) << "set " << index << ", step " << step;
      world.write_gradient(world.sets[index]);
    }
    EXPECT_EQ(queue.norm(ticket), max_norm() > 0 ? std::optional(norm) : std::nullopt);
  }
  world.world.check_invariants();
}

TEST_P(UpdateQueueResults, are_the_same_where_a_set_rests_on_the_host_and_others_on_nvme) {
  StreamSizes sizes = scarce;
  sizes.host_bytes += 12 * granule;
  UpdateWorld world(sizes);
  for (int i = 0; i < 6; ++i) {
    world.home = i == 1 ? Tier::host : Tier::nvme;
    world.add_set(0);
  }
  UpdateQueue queue(world.world.stream, in_background(), 2);
  for (std::int64_t step = 1; step <= 2; ++step) {
    const UpdateTicket ticket = queue.submit(world.job(step, max_norm(), world.all()));
    const double norm = world.update_arrays(step, max_norm(), world.all());
    for (TestSet& set : world.sets) {
      EXPECT_TRUE(world.is_current(set, AccessOrigin::program)) << "set " << set.index << ", step " << step;
      world.write_gradient(set);
    }
    EXPECT_EQ(queue.norm(ticket), max_norm() > 0 ? std::optional(norm) : std::nullopt);
  }
  world.world.check_invariants();
}

TEST_P(UpdateQueueResults, are_there_after_finish) {
  UpdateWorld world(from_nvme() ? scarce : roomy, from_nvme() ? Tier::nvme : Tier::host);
  world.add_sets(5);
  UpdateQueue queue(world.world.stream, in_background(), 2);
  queue.finish();  // of nothing
  queue.submit(world.job(1, max_norm(), world.all()));
  queue.finish();
  world.update_arrays(1, max_norm(), world.all());
  EXPECT_EQ(world.current(), world.all());
}

TEST_P(UpdateQueueResults, of_a_job_are_there_once_the_next_is_queued) {
  UpdateWorld world(from_nvme() ? scarce : roomy, from_nvme() ? Tier::nvme : Tier::host);
  world.add_sets(4);
  UpdateQueue queue(world.world.stream, in_background(), 2);
  const UpdateTicket first = queue.submit(world.job(1, max_norm(), world.all()));
  const double norm = world.update_arrays(1, max_norm(), world.all());
  queue.submit(world.job(2, max_norm(), {0}));
  EXPECT_TRUE(world.is_current(world.sets[1]));
  EXPECT_TRUE(world.is_current(world.sets[2]));
  EXPECT_TRUE(world.is_current(world.sets[3]));
  if (!in_background()) {
    EXPECT_TRUE(world.is_current(world.sets[0])) << "the next one's turn has not come";
  }
  EXPECT_EQ(queue.norm(first), max_norm() > 0 ? std::optional(norm) : std::nullopt) << "it stays known";
}

TEST_P(UpdateQueueResults, are_left_behind_by_the_destructor) {
  UpdateWorld world(from_nvme() ? scarce : roomy, from_nvme() ? Tier::nvme : Tier::host);
  world.add_sets(4);
  {
    UpdateQueue queue(world.world.stream, in_background(), 2);
    queue.submit(world.job(1, max_norm(), world.all()));
  }
  world.update_arrays(1, max_norm(), world.all());
  EXPECT_EQ(world.current(), world.all());
  EXPECT_TRUE(world.is_current(world.sets[0], AccessOrigin::program)) << "the stream asks nobody any more";
}

// ---- What is done when

/// A world whose arrays are updated at once, so that `current` are those whose chunks have been, too.
class QueuedUpdates : public testing::Test {
 protected:
  QueuedUpdates() : world_(roomy) { world_.add_sets(5); }

  UpdateTicket submit(double max_norm = not_clipping, std::vector<std::shared_ptr<const void>> gradients = {}) {
    UpdateJob job = world_.job(1, max_norm, world_.all());
    for (std::size_t i = 0; i < gradients.size(); ++i) job.segments[i].gradient = std::move(gradients[i]);
    const UpdateTicket ticket = queue_->submit(std::move(job));
    norm_ = world_.update_arrays(1, max_norm, world_.all());
    return ticket;
  }
  void use(ChunkId chunk, Access mode = Access::read, Tier tier = Tier::host) {
    world_.world.acquire(chunk, tier, mode);
  }
  ChunkSet& chunks(std::size_t set) { return world_.sets[set].chunks; }

  UpdateWorld world_;
  std::optional<UpdateQueue> queue_{std::in_place, world_.world.stream, false, 2};
  double norm_ = 0;
};

TEST_F(QueuedUpdates, submit_returns_before_anything_is_updated) {
  submit();
  EXPECT_THAT(world_.current(), ElementsAre());
}

TEST_F(QueuedUpdates, the_first_use_of_a_chunk_updates_its_set_only) {
  submit();
  use(chunks(3).parameter, Access::read, Tier::device);
  EXPECT_THAT(world_.current(), ElementsAre(3));
  use(*chunks(1).momentum);
  EXPECT_THAT(world_.current(), ElementsAre(1, 3));
  use(*chunks(3).master, Access::write);
  EXPECT_THAT(world_.current(), ElementsAre(1, 3));
  use(*chunks(0).variance);
  EXPECT_THAT(world_.current(), ElementsAre(0, 1, 3));
}

TEST_F(QueuedUpdates, an_access_of_several_sets_updates_all_of_them) {
  submit(clipping);
  const std::array accesses{ChunkAccess{chunks(4).parameter, Tier::device, Access::read},
                            ChunkAccess{chunks(2).parameter, Tier::device, Access::read}};
  world_.world.stream.acquire(accesses);
  EXPECT_THAT(world_.current(), ElementsAre(2, 4));
}

TEST_F(QueuedUpdates, settling_does_what_an_access_would) {
  submit();
  const ChunkAccess access{chunks(2).parameter, Tier::device, Access::read};
  world_.world.stream.settle_prior_work({&access, 1});
  EXPECT_THAT(world_.current(), ElementsAre(2));
}

TEST_F(QueuedUpdates, chunks_of_no_queued_set_are_used_freely) {
  TestSet& other = world_.add_set(0);
  queue_->submit(world_.job(1, clipping, {0, 1}));
  use(other.chunks.parameter, Access::write, Tier::device);
  use(*other.chunks.gradient, Access::write);
  EXPECT_EQ(world_.current(), world_.all());
}

TEST_F(QueuedUpdates, a_gradient_may_be_read_while_it_is_queued) {
  for (const double max_norm : {not_clipping, clipping}) {
    submit(max_norm);
    const auto before = world_.current();
    for (TestSet& set : world_.sets) EXPECT_TRUE(world_.holds(*set.chunks.gradient, set.gradient_bytes()));
    EXPECT_EQ(world_.current(), before);
    queue_->finish();
  }
}

TEST_F(QueuedUpdates, a_write_to_a_gradient_waits_for_its_update) {
  submit(clipping);
  world_.write_gradient(world_.sets[2]);
  EXPECT_THAT(world_.current(), ElementsAre(2));
  queue_->finish();
  EXPECT_EQ(world_.current(), world_.all());
}

TEST_F(QueuedUpdates, the_norm_is_known_without_an_update) {
  const UpdateTicket ticket = submit(clipping);
  EXPECT_EQ(queue_->norm(ticket), norm_);
  EXPECT_THAT(world_.current(), ElementsAre());
}

TEST_F(QueuedUpdates, without_clipping_there_is_no_norm) { EXPECT_EQ(queue_->norm(submit()), std::nullopt); }

TEST_F(QueuedUpdates, a_gradient_is_kept_until_its_set_is_updated) {
  std::vector<std::shared_ptr<const void>> gradients(10);
  std::vector<std::weak_ptr<const void>> kept;
  for (auto& gradient : gradients) kept.emplace_back(gradient = std::make_shared<int>());
  const UpdateTicket ticket = submit(clipping, std::move(gradients));
  const auto released = [&] {
    std::vector<std::size_t> sets;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      EXPECT_EQ(kept[i].expired(), kept[i / 2 * 2].expired()) << "parameters of one set go together";
      if (i % 2 == 0 && kept[i].expired()) sets.push_back(i / 2);
    }
    return sets;
  };
  EXPECT_THAT(released(), ElementsAre());
  queue_->norm(ticket);
  EXPECT_THAT(released(), ElementsAre());
  use(chunks(3).parameter);
  EXPECT_THAT(released(), ElementsAre(3));
  queue_->finish();
  EXPECT_THAT(released(), ElementsAre(0, 1, 2, 3, 4));
}

TEST_F(QueuedUpdates, a_gradient_that_outlives_its_update_waits_for_none) {
  const auto waits = [&] {
    return world_.world.stream.inspect(
        [&](const Policy& policy) { return policy.chunk(*chunks(0).gradient).update == Residency::Update::queued; });
  };
  submit();
  EXPECT_TRUE(waits());
  queue_->finish();
  EXPECT_FALSE(waits());
}

TEST_F(QueuedUpdates, the_owner_of_a_gradient_may_use_the_memory_as_it_goes) {
  TestSet& other = world_.add_set(0);
  std::vector<std::shared_ptr<const void>> gradients;
  int used = 0;
  for (std::size_t i = 0; i < 10; ++i) {
    gradients.emplace_back(nullptr, [&](const void*) {
      use(other.chunks.parameter);
      world_.world.stream.discard(*other.chunks.gradient);
      ++used;
    });
  }
  UpdateJob job = world_.job(1, clipping, {0, 1, 2, 3, 4});
  for (std::size_t i = 0; i < gradients.size(); ++i) job.segments[i].gradient = std::move(gradients[i]);
  gradients.clear();
  queue_->submit(std::move(job));
  queue_->finish();
  EXPECT_EQ(used, 10);
}

TEST_F(QueuedUpdates, the_background_works_without_being_asked) {
  queue_.reset();
  queue_.emplace(world_.world.stream, true, 2);
  std::array<std::promise<void>, 10> gone;
  std::vector<std::shared_ptr<const void>> gradients;
  for (std::promise<void>& each : gone) gradients.emplace_back(nullptr, [&](const void*) { each.set_value(); });
  submit(clipping, std::move(gradients));
  for (std::promise<void>& each : gone) each.get_future().wait();
  EXPECT_EQ(world_.current(), world_.all());
}

TEST_F(QueuedUpdates, the_background_begins_with_a_set_that_has_all_it_needs) {
  queue_.reset();
  queue_.emplace(world_.world.stream, true, 2);
  Pin pin = world_.world.acquire(chunks(0).parameter, Tier::device);  // which nobody may change meanwhile
  std::array<std::promise<void>, 10> gone;
  std::vector<std::shared_ptr<const void>> gradients;
  for (std::promise<void>& each : gone) gradients.emplace_back(nullptr, [&](const void*) { each.set_value(); });
  submit(clipping, std::move(gradients));
  for (std::size_t parameter = 2; parameter < 8; ++parameter) {
    const auto result = gone[parameter].get_future().wait_for(std::chrono::seconds(20));
    EXPECT_EQ(result, std::future_status::ready) << parameter << ", though only the first two have to wait";
  }
  pin.release();
  queue_->finish();
  EXPECT_EQ(world_.current(), world_.all());
}

// ---- Who is stalled by an update

double stalled(const UpdateWorld& world, StallCause cause) {
  return world.world.stream.usage().stall_seconds_by_cause[index_of(cause)];
}

TEST_F(QueuedUpdates, whoever_waits_for_another_thread_s_update_is_stalled_by_it) {
  queue_.reset();
  queue_.emplace(world_.world.stream, true, 2);
  for (int round = 0; round < 100 && stalled(world_, StallCause::update) == 0; ++round) {
    std::promise<void> reached, asked;
    std::vector<std::shared_ptr<const void>> gradients(10);
    gradients[0] = {nullptr, [&](const void*) {
                      reached.set_value();
                      asked.get_future().wait();
                      sleep_until(monotonic_ns() + 1'000'000);  // the rest of a slow update
                    }};
    submit(not_clipping, std::move(gradients));
    reached.get_future().wait();
    asked.set_value();
    use(chunks(0).parameter);
    queue_->finish();
  }
  EXPECT_GT(stalled(world_, StallCause::update), 0);
}

TEST(UpdateStalls, are_for_the_chunks_own_reasons_where_the_program_updates_by_itself) {
  for (const double max_norm : {not_clipping, clipping}) {
    UpdateWorld world(scarce, Tier::nvme);
    world.add_sets(6);
    UpdateQueue queue(world.world.stream, false, 2);
    const double before = stalled(world, StallCause::nvme_to_host);
    queue.submit(world.job(1, max_norm, world.all()));
    queue.finish();
    EXPECT_GT(stalled(world, StallCause::nvme_to_host), before);
    EXPECT_EQ(stalled(world, StallCause::update), 0) << "to compute is not to wait";
    EXPECT_GT(world.world.stream.usage().update_seconds, 0);
  }
}

TEST(UpdateStalls, are_not_what_the_background_waits_for) {
  UpdateWorld world(scarce, Tier::nvme);
  world.add_sets(6);
  UpdateQueue queue(world.world.stream, true, 2);
  const double before = world.world.stream.usage().stall_seconds;
  std::array<std::promise<void>, 12> gone;
  UpdateJob job = world.job(1, clipping, world.all());
  for (std::size_t i = 0; i < gone.size(); ++i) {
    job.segments[i].gradient = {nullptr, [&gone, i](const void*) { gone[i].set_value(); }};
  }
  queue.submit(std::move(job));
  for (std::promise<void>& each : gone) each.get_future().wait();
  EXPECT_EQ(world.world.stream.usage().stall_seconds, before);
  EXPECT_EQ(world.world.stream.usage().update_seconds, 0);
}

TEST(UpdateStalls, are_told_from_the_updates_by_the_timeline) {
  StreamSizes sizes = roomy;
  sizes.timeline_bytes = 1 << 20;
  UpdateWorld world(sizes);
  world.add_sets(3);
  UpdateQueue queue(world.world.stream, false, 2);
  queue.submit(world.job(1, clipping, world.all()));
  queue.finish();
  std::vector<std::optional<std::uint32_t>> updated;
  std::int64_t last_ns = 0;
  for (const TimelineEvent& event : world.world.timeline.snapshot().events) {
    if (const auto* const update = std::get_if<UpdateEvent>(&event)) {
      updated.push_back(update->set);
      EXPECT_LE(last_ns, update->begin_ns) << "one at a time";
      last_ns = update->end_ns;
    }
  }
  EXPECT_THAT(updated, ElementsAre(std::nullopt, 0, 1, 2)) << "the norm first";
}

// ---- The order of sets

std::vector<ChunkId> parameters_of(const UpdateTicket& ticket) {
  std::vector<ChunkId> parameters;
  for (std::size_t item = 0; item < ticket->size(); ++item) parameters.push_back(ticket->chunks(item).parameter);
  return parameters;
}

TEST_F(QueuedUpdates, are_in_parameter_order_while_nothing_is_known) {
  EXPECT_THAT(parameters_of(submit()), ElementsAre(chunks(0).parameter, chunks(1).parameter, chunks(2).parameter,
                                                   chunks(3).parameter, chunks(4).parameter));
}

TEST_F(QueuedUpdates, are_in_the_order_in_which_the_next_pass_needs_them) {
  AccessStream& stream = world_.world.stream;
  stream.step_mark();
  stream.begin_pass(1);
  for (const std::size_t set : {3u, 1u, 4u, 0u, 1u}) use(chunks(set).parameter, Access::read, Tier::device);
  stream.step_mark();
  EXPECT_THAT(parameters_of(submit()), ElementsAre(chunks(3).parameter, chunks(1).parameter, chunks(4).parameter,
                                                   chunks(0).parameter, chunks(2).parameter));
}

TEST(UpdatePipeline, has_the_states_of_several_sets_on_their_way_before_the_first_is_updated) {
  StreamSizes sizes = roomy;
  sizes.host_bytes = 48 * granule;
  sizes.prefetch_depth = 24;
  UpdateWorld world(sizes, Tier::nvme);
  world.add_sets(12);
  const auto copies_on_host = [&](TestSet& set) {
    std::size_t copies = 0;
    for (const auto& [chunk, bytes] : set.state()) {
      copies += world.world.state(chunk, Tier::host) != CopyState::absent ? 1u : 0u;
    }
    return copies;
  };
  UpdateQueue queue(world.world.stream, false, 2);
  world.world.stream.allocate(sizes.host_bytes, Kind::other, Tier::host);  // all has to leave for it
  world.world.stream.free(sizes.host_bytes, Kind::other, Tier::host);
  EXPECT_EQ(copies_on_host(world.sets[0]), 0u);
  queue.submit(world.job(1, not_clipping, world.all()));
  for (const std::size_t set : {0u, 1u, 2u}) {
    EXPECT_EQ(copies_on_host(world.sets[set]), world.sets[set].state().size()) << set;
  }
  queue.finish();
  world.update_arrays(1, not_clipping, world.all());
  EXPECT_EQ(world.current(), world.all());
}

}  // namespace
}  // namespace terrace
