/// A size that is computed from what a configuration says, which may be any number: what 64 bits do not hold stays the
/// largest that they do, and so more than any memory has.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>

namespace terrace {

class Saturating {
 public:
  static constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();

  /// Not explicit: it stands among plain numbers.
  constexpr Saturating(std::uint64_t value) : value_(value) {}  // NOLINT(google-explicit-constructor)

  constexpr std::uint64_t value() const noexcept { return value_; }

  friend constexpr Saturating operator+(Saturating a, Saturating b) {
    std::uint64_t sum = 0;
    return __builtin_add_overflow(a.value_, b.value_, &sum) ? most : sum;
  }
  friend constexpr Saturating operator*(Saturating a, Saturating b) {
    std::uint64_t product = 0;
    return __builtin_mul_overflow(a.value_, b.value_, &product) ? most : product;
  }
  friend constexpr auto operator<=>(const Saturating&, const Saturating&) = default;

 private:
  std::uint64_t value_;
};

}  // namespace terrace
