#include "offload/budget.h"

#include <utility>

#include "base/error.h"
#include "base/units.h"

namespace terrace {

bool Budget::try_reserve(Kind kind, std::uint64_t bytes) noexcept {
  std::uint64_t before = total_.now.load(std::memory_order_relaxed);
  do {
    if (bytes > capacity_ - before) {
      return false;
    }
  } while (!total_.now.compare_exchange_weak(before, before + bytes, std::memory_order_acq_rel));
  raise_to(total_.peak, before + bytes);
  raise_to(step_peak_, before + bytes);
  raise_to(sample_peak_, before + bytes);
  add(kind, bytes);
  return true;
}

void Budget::release(Kind kind, std::uint64_t bytes) noexcept {
  subtract(kind, bytes);
  total_.now.fetch_sub(bytes, std::memory_order_acq_rel);
}

void Budget::recount(Kind from, Kind to, std::uint64_t bytes) noexcept {
  subtract(from, bytes);
  add(to, bytes);
}

void Budget::add(Kind kind, std::uint64_t bytes) noexcept {
  Gauge& gauge = kinds_[index_of(kind)];
  raise_to(gauge.peak, gauge.now.fetch_add(bytes, std::memory_order_relaxed) + bytes);
  if (!is_chunk_kind(kind)) {
    raise_to(program_peak_, program_now_.fetch_add(bytes, std::memory_order_relaxed) + bytes);
    add_held(bytes);
  }
}

void Budget::subtract(Kind kind, std::uint64_t bytes) noexcept {
  kinds_[index_of(kind)].now.fetch_sub(bytes, std::memory_order_relaxed);
  if (!is_chunk_kind(kind)) {
    program_now_.fetch_sub(bytes, std::memory_order_relaxed);
    held_.now.fetch_sub(bytes, std::memory_order_relaxed);
  }
}

std::uint64_t Budget::take_step_peak() noexcept {
  const std::uint64_t peak = step_peak_.exchange(used(), std::memory_order_relaxed);
  raise_to(step_peak_, used());  // what was reserved between the two
  return peak;
}

std::uint64_t Budget::take_sample_peak() noexcept {
  const std::uint64_t peak = sample_peak_.exchange(used(), std::memory_order_relaxed);
  raise_to(sample_peak_, used());  // what was reserved between the two
  return peak;
}

std::optional<std::array<std::uint64_t, kind_count>> Budget::used_by_kind() const noexcept {
  constexpr int attempts = 8;
  for (int attempt = 0; attempt < attempts; ++attempt) {
    std::array<std::uint64_t, kind_count> kinds{};
    std::uint64_t sum = 0;
    for (const Kind kind : all_kinds) {
      sum += kinds[index_of(kind)] = used(kind);
    }
    if (sum == used()) {
      return kinds;
    }
  }
  return std::nullopt;
}

std::uint64_t Budget::reset_program_peak() noexcept {
  const std::uint64_t now = program_now_.load(std::memory_order_relaxed);
  const std::uint64_t peak = program_peak_.exchange(now, std::memory_order_relaxed);
  raise_to(program_peak_, program_now_.load(std::memory_order_relaxed));
  return peak;
}

void Budget::need(std::uint64_t bytes) noexcept { raise_to(held_.peak, bytes); }

std::string Budget::describe() const {
  std::string text(name_of(tier_));
  text += ": " + format_bytes(used()) + " of " + format_bytes(capacity_) + " used";
  const char* separator = ": ";
  for (const Kind kind : all_kinds) {
    if (used(kind) > 0) {
      text += separator + std::string(name_of(kind)) + " " + format_bytes(used(kind));
      separator = ", ";
    }
  }
  return text;
}

std::string Budget::hint_to_hold(std::uint64_t bytes) const {
  return "raise " + std::string(name_of(tier_)) + ".memory to at least " + format_bytes_exactly(setting_for(bytes));
}

Reservation::Reservation(Budget& budget, Kind kind, std::uint64_t bytes)
    : budget_(&budget), kind_(kind), bytes_(bytes) {
  if (!budget.try_reserve(kind, bytes)) {
    throw OutOfMemory(std::string(name_of(budget.tier())) + ": " + format_bytes(bytes) + " for " +
                          std::string(name_of(kind)) + " do not fit; " + budget.describe(),
                      budget.hint_to_hold(budget.used() + bytes));
  }
}

Reservation::Reservation(Reservation&& other) noexcept
    : budget_(std::exchange(other.budget_, nullptr)), kind_(other.kind_), bytes_(std::exchange(other.bytes_, 0)) {}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    give_back();
    budget_ = std::exchange(other.budget_, nullptr);
    kind_ = other.kind_;
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Reservation::~Reservation() { give_back(); }

void Reservation::give_back() noexcept {
  if (budget_ != nullptr) {
    budget_->release(kind_, bytes_);
    budget_ = nullptr;
  }
}

}  // namespace terrace
