#include "integration/activation_planner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"
#include "integration/managed_storage.h"

namespace terrace {
namespace {

/// Of a step: what is waited for less is not worth a plan, and a plan that gains less is not tried.
constexpr double least_share = 0.01;
constexpr std::uint64_t unlimited_room = std::numeric_limits<std::uint64_t>::max() / 2;
/// Before one is measured.
constexpr int steps_to_watch = 2;
/// With the plan.
constexpr int steps_to_judge = 5;

/// Bytes of activations since the session began.
std::uint64_t left_device(const MemoryUsage& usage) { return usage.moved(Link::device_to_host, Kind::activation); }

/// A moment, and how long the program had waited by then.
struct Moment {
  std::int64_t ns = 0;
  double stalled_seconds = 0;
};

double seconds_between(const Moment& from, const Moment& to) { return static_cast<double>(to.ns - from.ns) * 1e-9; }
double computed_between(const Moment& from, const Moment& to) {
  return std::max(0.0, seconds_between(from, to) - (to.stalled_seconds - from.stalled_seconds));
}

std::string in_seconds(double seconds) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.3g s", seconds);
  return text.data();
}

std::string in_words(const ActivationReport& report) {
  const auto count = [&](BlockActivations which) {
    return std::to_string(std::count(report.blocks.begin(), report.blocks.end(), which));
  };
  return "of " + std::to_string(report.blocks.size()) + " blocks, which save " + format_bytes(report.saved_bytes) +
         ", " + count(BlockActivations::keep) + " keep it on the device, " + count(BlockActivations::offload) +
         " have it leave, " + count(BlockActivations::recompute) + " run again; predicted are " +
         format_bytes(report.predicted_bytes) + " that leave the device a step, in " +
         in_seconds(report.predicted_seconds) + " (before: " + format_bytes(report.bytes_before) + ", in " +
         in_seconds(report.seconds_before) + ")";
}

}  // namespace

/// A forward through blocks, and the backward that follows.
struct ActivationPlanner::Pass {
  explicit Pass(const std::function<MemoryUsage()>& session_usage) : usage(session_usage) {}

  Moment now() const { return {monotonic_ns(), usage().stall_seconds}; }
  /// Backward has asked for all that was saved, and ended.
  bool is_whole();
  bool is_like(const Pass& other) const;

  const std::function<MemoryUsage()> usage;
  std::mutex mutex;  ///< of what backward changes, in calls too
  std::vector<std::shared_ptr<Call>> calls;
  bool is_in_backward = false;
  std::optional<Moment> ended;
};

class ActivationPlanner::Call final : public BlockMeter {
 public:
  Call(const std::shared_ptr<Pass>& pass, std::uint64_t given) : began(pass->now()), given_bytes(given), pass_(pass) {}

  void reads(const at::Tensor& input) override { input_bytes += is_new(input, inputs_) ? input.storage().nbytes() : 0; }
  void saves(const at::Tensor& tensor) override {
    const bool is_input = tensor.has_storage() && inputs_.contains(tensor.storage().unsafeGetStorageImpl());
    saved_bytes += !is_input && is_new(tensor, saved_) ? tensor.storage().nbytes() : 0;
  }
  void ends() noexcept override {
    if (const auto pass = pass_.lock()) {
      ended = pass->now();
    }
  }
  void asked_for() noexcept override {
    const auto pass = pass_.lock();
    if (pass == nullptr) {
      return;  // its step has ended
    }
    const std::scoped_lock lock(pass->mutex);
    if (!wanted) {
      wanted = pass->now();
    }
    const int backward = torch::autograd::get_current_graph_task_id();
    if (backward_ != backward) {
      backward_ = backward;
      held_bytes = std::max(held_bytes, pass->usage().tiers[index_of(Tier::device)].held);
    }
    if (!std::exchange(pass->is_in_backward, true) && backward != -1) {
      torch::autograd::Engine::get_default_engine().queue_callback([weak = pass_] {
        if (const auto over = weak.lock()) {
          const std::scoped_lock over_lock(over->mutex);
          over->ended = over->now();
        }
      });
    }
  }

  const Moment began;
  const std::uint64_t given_bytes;  ///< to the call, of all its tensors
  std::optional<Moment> ended;
  std::optional<Moment> wanted;   ///< by backward
  std::uint64_t held_bytes = 0;   ///< on the device by then, of what could not leave: the most of all backwards
  std::uint64_t input_bytes = 0;  ///< of distinct storages
  std::uint64_t saved_bytes = 0;  ///< of others

 private:
  /// Weak: what has left is gone, but no other storage may get its address.
  using Storages = std::map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>>;

  /// Parameters are no activations.
  static bool is_new(const at::Tensor& tensor, Storages& seen) {
    return tensor.has_storage() && ManagedStorage::of(tensor) == nullptr &&
           seen.emplace(tensor.storage().unsafeGetStorageImpl(), tensor.storage().getWeakStorageImpl()).second;
  }

  const std::weak_ptr<Pass> pass_;
  std::optional<int> backward_;  ///< the last that has asked
  Storages inputs_;
  Storages saved_;
};

bool ActivationPlanner::Pass::is_whole() {
  const std::scoped_lock lock(mutex);
  return ended && std::all_of(calls.begin(), calls.end(),
                              [](const auto& call) { return call->ended && (call->wanted || call->saved_bytes == 0); });
}

bool ActivationPlanner::Pass::is_like(const Pass& other) const {
  return std::equal(calls.begin(), calls.end(), other.calls.begin(), other.calls.end(),
                    [](const auto& one, const auto& another) {
                      return one->saved_bytes == another->saved_bytes && one->input_bytes == another->input_bytes;
                    });
}

struct ActivationPlanner::Measured {
  /// Of a call, in any pass.
  struct Bounds {
    std::uint64_t given_bytes = 0;
    std::uint64_t held_bytes = 0;  ///< on the device when backward came to it, of what could not leave
  };

  std::size_t passes = 0;
  PassProfile pass;            ///< the last
  std::vector<Bounds> bounds;  ///< of each of its calls
  double forward_seconds = 0;  ///< with what was waited for
  double backward_seconds = 0;
  double computed_seconds = 0;
};

BlockPlanner::Decision ActivationPlanner::begin_call(std::uint64_t given_bytes) {
  const std::scoped_lock lock(mutex_);
  const std::size_t position = calls_++;
  if (!plan_.empty()) {
    const PlannedCall& planned = plan_[position % plan_.size()];
    return {.runs_again = planned.runs_again && given_bytes <= planned.given_bytes, .meter = nullptr};
  }
  if (stage_ != Stage::measuring) {
    return {};
  }
  const auto is_over = [](Pass& pass) {
    const std::scoped_lock pass_lock(pass.mutex);
    return pass.is_in_backward;
  };
  if (passes_.empty() || is_over(*passes_.back())) {
    passes_.push_back(std::make_shared<Pass>(usage_));
  }
  const auto call = std::make_shared<Call>(passes_.back(), given_bytes);
  passes_.back()->calls.push_back(call);
  return {.runs_again = false, .meter = call};
}

void ActivationPlanner::end_step() {
  const std::scoped_lock lock(mutex_);
  const std::size_t calls = std::exchange(calls_, 0);
  if (stage_ == Stage::settled || calls == 0) {
    return;
  }
  const MemoryUsage usage = usage_();
  const std::int64_t now_ns = monotonic_ns();
  const double seconds = static_cast<double>(now_ns - std::exchange(step_began_ns_, now_ns)) * 1e-9;
  const std::uint64_t left = left_device(usage);
  const std::uint64_t left_in_step = left - std::exchange(left_before_, left);
  const bool is_alike = calls == std::exchange(calls_before_, calls);
  if (stage_ != Stage::trying && !is_alike) {
    stage_ = Stage::watching;
    steps_ = 0;
    passes_.clear();
  }
  // In the first one residency learns what a step is.
  if (++steps_ > 1) {
    fastest_seconds_ = steps_ == 2 ? seconds : std::min(fastest_seconds_, seconds);
  }
  if (stage_ == Stage::watching) {
    stage_ = steps_ == steps_to_watch ? Stage::measuring : Stage::watching;
  } else if (stage_ == Stage::measuring) {
    stage_ = Stage::watching;
    steps_ = 0;
    if (std::optional<Measured> seen = measured()) {
      make_plan(std::move(*seen), usage, left_in_step);
    }
    passes_.clear();
  } else if (steps_ > 1) {
    report_->measured_seconds = fastest_seconds_;
    report_->measured_bytes = left_in_step;
    if (steps_ == steps_to_judge) {
      judge_plan();
    }
  }
}

std::optional<ActivationReport> ActivationPlanner::report() const {
  const std::scoped_lock lock(mutex_);
  return report_;
}

std::optional<ActivationPlanner::Measured> ActivationPlanner::measured() const {
  if (passes_.empty()) {
    return std::nullopt;
  }
  const Pass& last = *passes_.back();
  for (const auto& pass : passes_) {
    if (!pass->is_whole() || !pass->is_like(last)) {
      return std::nullopt;
    }
  }
  Measured seen;
  seen.passes = passes_.size();
  for (const auto& call : last.calls) {
    const double computed = computed_between(call->began, *call->ended);
    seen.pass.blocks.push_back({.forward_seconds = computed,
                                .backward_seconds = 0,
                                .input_bytes = call->input_bytes,
                                .saved_bytes = call->saved_bytes});
    seen.bounds.push_back({.given_bytes = call->given_bytes, .held_bytes = 0});
    seen.forward_seconds += seconds_between(call->began, *call->ended);
    seen.computed_seconds += computed;
  }
  for (const auto& pass : passes_) {
    for (std::size_t i = 0; i < pass->calls.size(); ++i) {
      seen.bounds[i].held_bytes = std::max(seen.bounds[i].held_bytes, pass->calls[i]->held_bytes);
    }
  }
  // The backward of each goes on until another is asked for.
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < last.calls.size(); ++i) {
    if (last.calls[i]->wanted) {
      order.push_back(i);
    }
  }
  const auto wanted = [&](std::size_t i) -> const Moment& { return *last.calls[i]->wanted; };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t one, std::size_t other) { return wanted(one).ns < wanted(other).ns; });
  for (std::size_t i = 0; i < order.size(); ++i) {
    const Moment& end = i + 1 < order.size() ? wanted(order[i + 1]) : *last.ended;
    const double computed = computed_between(wanted(order[i]), end);
    seen.pass.blocks[order[i]].backward_seconds = computed;
    seen.backward_seconds += seconds_between(wanted(order[i]), end);
    seen.computed_seconds += computed;
  }
  return seen;
}

void ActivationPlanner::make_plan(Measured seen, const MemoryUsage& usage, std::uint64_t left_bytes) {
  stage_ = Stage::settled;
  const auto passes = static_cast<double>(seen.passes);
  const double worth_it = least_share * fastest_seconds_;
  // Where some had to leave, the rest had what room there is.
  seen.pass.room_bytes = left_bytes > 0 ? usage.peak(Tier::device, Kind::activation) : unlimited_room;
  set_rates_as_seen(seen.pass, seen.forward_seconds, seen.backward_seconds);
  // One that runs again needs what it did at first, which the whole step bounds, beside what backward holds by then.
  for (std::size_t i = 0; i < seen.pass.blocks.size(); ++i) {
    seen.pass.blocks[i].may_run_again =
        seen.bounds[i].held_bytes + usage.needed(Tier::device) <= usage.capacity(Tier::device);
  }
  const Recomputed none(seen.pass.blocks.size());
  const double seconds_of_none = play(seen.pass, none).seconds;
  const double waited = (seen.forward_seconds + seen.backward_seconds - seen.computed_seconds) * passes;
  Recomputed plan = none;
  // Where the room seen does not hold a block, as what it saved left while it ran, nothing is known of what does.
  const bool is_known = std::isfinite(seconds_of_none);
  if (left_bytes > 0 && waited > worth_it && is_known) {
    plan = plan_recompute(seen.pass);
    if ((seconds_of_none - play(seen.pass, plan).seconds) * passes <= worth_it) {
      plan = none;
    }
  }
  const PlayedPass played = play(seen.pass, plan);
  ActivationReport report;
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const BlockProfile& block = seen.pass.blocks[i];
    const std::uint64_t bytes = block.input_bytes + block.saved_bytes;
    report.saved_bytes += bytes;
    report.blocks.push_back(plan[i]                                             ? BlockActivations::recompute
                            : bytes > 0 && 2 * played.leaving_bytes[i] >= bytes ? BlockActivations::offload
                                                                                : BlockActivations::keep);
  }
  report.seconds_before = fastest_seconds_;
  report.bytes_before = left_bytes;
  report.predicted_seconds = fastest_seconds_ - (is_known ? seconds_of_none - played.seconds : 0) * passes;
  report.predicted_bytes = is_known ? played.all_leaving_bytes() * seen.passes : left_bytes;
  log(LogLevel::info, "activations: " + in_words(report));
  report_ = std::move(report);
  if (plan != none) {
    for (std::size_t i = 0; i < plan.size(); ++i) {
      plan_.push_back({.runs_again = plan[i], .given_bytes = seen.bounds[i].given_bytes});
    }
    stage_ = Stage::trying;
  }
}

void ActivationPlanner::judge_plan() {
  stage_ = Stage::settled;
  report_->is_dropped = *report_->measured_seconds > report_->seconds_before;
  if (report_->is_dropped) {
    plan_.clear();
  }
  log(LogLevel::info, "activations: measured " + format_bytes(*report_->measured_bytes) + " that leave the device a " +
                          "step, in " + in_seconds(*report_->measured_seconds) +
                          (report_->is_dropped ? "; that is slower, and no block runs again" : ""));
}

}  // namespace terrace
