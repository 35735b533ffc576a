#include "memory/timeline.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <numeric>
#include <string>
#include <system_error>
#include <type_traits>

#include "base/clock.h"
#include "base/error.h"
#include "memory/current_op.h"
#include "memory/timeline_trace.h"

namespace terrace {
namespace {

static_assert(std::is_trivially_copyable_v<TimelineEvent>);
static_assert(sizeof(TimelineEvent) <= 56);

/// Where nothing else happens, what is used is sampled no more often than this.
constexpr std::int64_t sample_interval_ns = 200'000;

std::uint64_t sum_of(const std::array<std::uint64_t, kind_count>& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
}

std::int64_t end_of(const TimelineEvent& event) {
  struct {
    std::int64_t operator()(const TransferRecord& transfer) { return transfer.ended_ns; }
    std::int64_t operator()(const StallEvent& stall) { return stall.end_ns; }
    std::int64_t operator()(const StepEvent& step) { return step.end_ns; }
    std::int64_t operator()(const StepTotals&) { return 0; }  // goes with its step
    std::int64_t operator()(const UpdateEvent& update) { return update.end_ns; }
    std::int64_t operator()(const UsageEvent& usage) { return usage.at_ns; }
  } end;
  return std::visit(end, event);
}

std::size_t events_in(std::uint64_t bytes) {
  if (bytes != 0 && bytes < Timeline::least_bytes) {
    throw LogicError("timeline: " + std::to_string(bytes) + " B hold too few events",
                     "give it " + std::to_string(Timeline::least_bytes) + " B or more, or none");
  }
  return static_cast<std::size_t>(bytes / sizeof(TimelineEvent));
}

}  // namespace

Timeline::Timeline(std::uint64_t bytes, std::array<Budget*, tier_count> budgets)
    : capacity_(events_in(bytes)),
      budgets_(budgets),
      origin_ns_(monotonic_ns()),
      complete_since_ns_(origin_ns_),
      step_began_ns_(origin_ns_) {
  ring_.reserve(capacity_);
}

void Timeline::on_transfer(const TransferRecord& record) noexcept { this->record(record); }

void Timeline::record_stall(StallCause cause, std::int64_t begin_ns, std::int64_t end_ns,
                            std::optional<ChunkName> chunk) noexcept {
  record(StallEvent{.begin_ns = begin_ns, .end_ns = end_ns, .op = CurrentOp::name(), .chunk = chunk, .cause = cause});
}

void Timeline::record_update(std::int64_t begin_ns, std::int64_t end_ns, std::optional<std::uint32_t> set) noexcept {
  record(UpdateEvent{.begin_ns = begin_ns, .end_ns = end_ns, .set = set});
}

void Timeline::begin_first_step() noexcept {
  const Lock lock(mutex_);
  if (!first_step_began_ && steps_ == 0) {
    first_step_began_ = true;
    step_began_ns_ = monotonic_ns();
  }
}

void Timeline::end_step(std::int64_t end_ns, const StepTotals& totals) noexcept {
  if (!keeps_events()) {
    return;
  }
  const Lock lock(mutex_);
  push(StepEvent{.begin_ns = step_began_ns_, .end_ns = end_ns, .number = ++steps_}, lock);
  push(totals, lock);
  step_began_ns_ = end_ns;
  sample(lock);
}

void Timeline::sample_if_due() noexcept {
  if (keeps_events() && monotonic_ns() >= next_sample_ns_.load(std::memory_order_relaxed)) {
    const Lock lock(mutex_);
    sample(lock);
  }
}

TimelineSnapshot Timeline::snapshot() {
  const Lock lock(mutex_);
  if (keeps_events()) {
    sample(lock);
  }
  TimelineSnapshot copy{.origin_ns = origin_ns_,
                        .complete_since_ns = complete_since_ns_,
                        .dropped = dropped_,
                        .budgets = {},
                        .usage = usage_before_,
                        .events = {}};
  for (const Tier tier : all_tiers) {
    copy.budgets[index_of(tier)] = budgets_[index_of(tier)]->capacity();
  }
  copy.events.reserve(count_);
  for (std::size_t at = 0; at < count_; ++at) {
    copy.events.push_back(ring_[(oldest_ + at) % capacity_]);
  }
  return copy;
}

void Timeline::write(const std::filesystem::path& path) {
  if (!keeps_events()) {
    throw LogicError("timeline: nothing was kept to be written to " + path.string(),
                     "give timeline.memory a size, as in \"256KiB\"");
  }
  const TimelineSnapshot copy = snapshot();
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  if (file) {
    write_trace(copy, file);
    file.flush();
  }
  if (!file) {
    throw IoError("timeline: writing " + path.string() + " failed: " + std::generic_category().message(errno),
                  "give a path that can be written, on a disk with free space");
  }
}

void Timeline::record(const TimelineEvent& event) noexcept {
  if (keeps_events()) {
    const Lock lock(mutex_);
    push(event, lock);
    sample(lock);
  }
}

void Timeline::sample(const Lock& lock) noexcept {
  const std::int64_t now_ns = monotonic_ns();
  next_sample_ns_.store(now_ns + sample_interval_ns, std::memory_order_relaxed);
  for (const Tier tier : all_tiers) {
    sample(tier, now_ns, lock);
  }
}

void Timeline::sample(Tier tier, std::int64_t now_ns, const Lock& lock) noexcept {
  Budget& budget = *budgets_[index_of(tier)];
  const auto used = budget.used_by_kind();
  if (!used) {
    return;  // it changes too fast to be seen; the next sample tells
  }
  auto& known = usage_now_[index_of(tier)];
  const std::uint64_t peak = budget.take_sample_peak();
  const bool rose_between = peak > std::max(sum_of(known), sum_of(*used));
  const auto differs = [&](Kind kind) { return known[index_of(kind)] != (*used)[index_of(kind)]; };
  const bool changed = *used != known;
  for (const Kind kind : all_kinds) {
    if (differs(kind) || (!changed && rose_between && kind == all_kinds.front())) {
      push(UsageEvent{.at_ns = now_ns, .bytes = (*used)[index_of(kind)], .tier_peak = peak, .tier = tier, .kind = kind},
           lock);
    }
  }
  known = *used;
}

void Timeline::push(const TimelineEvent& event, const Lock& lock) noexcept {
  if (count_ == capacity_) {
    drop_oldest(lock);
  }
  const std::size_t place = (oldest_ + count_) % capacity_;
  if (place == ring_.size()) {
    ring_.push_back(event);
  } else {
    ring_[place] = event;
  }
  ++count_;
}

void Timeline::drop_oldest(const Lock&) noexcept {
  const TimelineEvent first = ring_[oldest_];
  const auto goes_too = [&] {
    const TimelineEvent& next = ring_[oldest_];
    const auto* const usage = std::get_if<UsageEvent>(&first);
    const auto* const more_usage = std::get_if<UsageEvent>(&next);
    return count_ > 0 && (std::holds_alternative<StepTotals>(next) ||
                          (usage != nullptr && more_usage != nullptr && more_usage->at_ns == usage->at_ns));
  };
  do {
    forget(ring_[oldest_]);
    oldest_ = (oldest_ + 1) % capacity_;
    --count_;
  } while (goes_too());
}

void Timeline::forget(const TimelineEvent& event) noexcept {
  if (const auto* const usage = std::get_if<UsageEvent>(&event)) {
    usage_before_[index_of(usage->tier)][index_of(usage->kind)] = usage->bytes;
  }
  complete_since_ns_ = std::max(complete_since_ns_, end_of(event));
  ++dropped_;
}

}  // namespace terrace
