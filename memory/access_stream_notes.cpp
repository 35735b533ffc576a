// What is counted and recorded of the stream: stalls, updates, steps and what is used.
#include <algorithm>
#include <numeric>

#include "base/clock.h"
#include "memory/access_stream.h"

namespace terrace {
namespace {

double seconds(std::int64_t ns) noexcept { return static_cast<double>(ns) * 1e-9; }

}  // namespace

void AccessStream::await_verdict(const Request& request, Lock& lock, AccessOrigin origin) {
  const auto waits = [&] { return request.verdict == Request::Verdict::waiting; };
  if (origin == AccessOrigin::background_work) {
    changed_.wait(lock, [&] { return !waits(); });
    return;
  }
  std::int64_t since_ns = monotonic_ns();
  DeviceIdle idle = places_.device_idle();
  for (Wait wait = policy_.wait_of(request); waits();) {
    idle.wait(changed_, lock);
    const Wait next = waits() ? policy_.wait_of(request) : wait;
    if (!waits() || next != wait) {
      const std::int64_t now_ns = monotonic_ns();
      note_stall(wait, idle.begin_within(since_ns, now_ns), now_ns, lock);
      since_ns = now_ns;
      wait = next;
    }
  }
}

void AccessStream::note_stall(const Wait& wait, std::int64_t begin_ns, std::int64_t end_ns, const Lock& lock) noexcept {
  if (begin_ns == end_ns) {
    return;
  }
  stalled_ns_[index_of(wait.cause)] += end_ns - begin_ns;
  if (timeline_ != nullptr) {
    timeline_->record_stall(wait.cause, begin_ns, end_ns, chunk_name(wait.chunk, lock));
  }
}

void AccessStream::note_wait_for_update(std::optional<ChunkId> chunk, std::int64_t begin_ns,
                                        std::int64_t end_ns) noexcept {
  const Lock lock(mutex_);
  note_stall({StallCause::update, chunk}, begin_ns, end_ns, lock);
}

void AccessStream::note_update(std::optional<ChunkId> parameter, std::int64_t begin_ns, std::int64_t end_ns) noexcept {
  if (timeline_ != nullptr) {
    const Lock lock(mutex_);
    const std::optional<ChunkName> name = chunk_name(parameter, lock);
    timeline_->record_update(begin_ns, end_ns, name ? std::optional(name->index) : std::nullopt);
  }
}

void AccessStream::note_update_arithmetic(std::int64_t ns) noexcept {
  const Lock lock(mutex_);
  update_ns_ += ns;
}

std::optional<ChunkName> AccessStream::chunk_name(std::optional<ChunkId> chunk, const Lock&) const {
  if (!chunk) {
    return std::nullopt;
  }
  const ChunkInfo& info = policy_.chunk(*chunk).info();
  return ChunkName{info.kind, info.index};
}

void AccessStream::sample_usage() noexcept {
  if (timeline_ != nullptr) {
    timeline_->sample_if_due();
  }
}

void AccessStream::step_mark() {
  const Lock lock(mutex_);
  policy_.step_mark();
  carry_out(lock);
  for (const Tier tier : all_tiers) {
    step_peaks_[index_of(tier)] = budgets_[index_of(tier)]->take_step_peak();
  }
  std::int64_t now_ns = 0;
  at_step_end_ = totals(lock, &now_ns);
  if (timeline_ != nullptr) {
    timeline_->end_step(
        now_ns, {.stall_ns = std::accumulate(stalled_ns_.begin(), stalled_ns_.end(), std::int64_t{0}),
                 .bytes_moved = {at_step_end_.moved(Link::nvme_to_host), at_step_end_.moved(Link::host_to_nvme),
                                 at_step_end_.moved(Link::host_to_device), at_step_end_.moved(Link::device_to_host)}});
  }
}

MemoryUsage::AtStepEnd AccessStream::totals(const Lock&, std::int64_t* at_ns) const {
  MemoryUsage::AtStepEnd totals{.bytes_moved = transfers_.moved(at_ns), .update_seconds = seconds(update_ns_)};
  std::transform(stalled_ns_.begin(), stalled_ns_.end(), totals.stall_seconds_by_cause.begin(), seconds);
  return totals;
}

MemoryUsage AccessStream::usage() const {
  MemoryUsage usage;
  const Lock lock(mutex_);
  const MemoryUsage::AtStepEnd now = totals(lock);
  usage.bytes_moved = now.bytes_moved;
  usage.stall_seconds_by_cause = now.stall_seconds_by_cause;
  usage.stall_seconds = std::accumulate(now.stall_seconds_by_cause.begin(), now.stall_seconds_by_cause.end(), 0.0);
  usage.update_seconds = now.update_seconds;
  usage.at_step_end = at_step_end_;
  usage.demand_fetches = policy_.demand_fetches();
  for (const Tier tier : all_tiers) {
    const std::size_t at = index_of(tier);
    MemoryUsage::OfTier& figures = usage.tiers[at];
    const Budget& budget = *budgets_[at];
    figures.capacity = budget.capacity();
    figures.now = budget.used();
    figures.peak = budget.peak();
    figures.step_peak = step_peaks_[at];
    figures.chunk_peak = policy_.peak_chunk_bytes(tier);
    figures.held = budget.held();
    figures.needed = budget.needed();
    for (const Kind kind : all_kinds) {
      figures.now_by_kind[index_of(kind)] = budget.used(kind);
      figures.peak_by_kind[index_of(kind)] = budget.peak(kind);
    }
  }
  return usage;
}

}  // namespace terrace
