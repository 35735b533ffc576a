/// A set of places in a row, of which most lie side by side: a bit each, so that a change needs no memory, and long
/// rows are searched soon. Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

namespace terrace {

/// Places are numbered from 0, and any that is asked about or changed is below `places()`.
class PlaceSet {
 public:
  PlaceSet() = default;
  /// None of so many places.
  explicit PlaceSet(std::uint64_t places);

  std::uint64_t places() const noexcept { return places_; }  ///< in the row
  std::uint64_t count() const noexcept { return count_; }    ///< in the set
  bool contains(std::uint64_t place) const noexcept {
    return (bits_[place / word_bits] >> place % word_bits & 1U) != 0;
  }
  void insert(std::uint64_t place) noexcept;
  void erase(std::uint64_t place) noexcept;

  /// The first of the set from there on and before `end`; `end`, or `places()` if that is less, where there is none.
  std::uint64_t next(std::uint64_t from, std::uint64_t end = ~std::uint64_t{0}) const noexcept;
  /// The first that is not of it, likewise.
  std::uint64_t next_missing(std::uint64_t from, std::uint64_t end = ~std::uint64_t{0}) const noexcept;
  /// The first of so many neighbours of the set, the lowest; `places()` where there is no such run, or none is asked
  /// for.
  std::uint64_t first_of_run(std::uint64_t count) const noexcept;

 private:
  static constexpr std::uint64_t word_bits = 64;

  std::uint64_t find(std::uint64_t from, std::uint64_t end, bool contained) const noexcept;

  std::uint64_t places_ = 0;
  std::uint64_t count_ = 0;
  std::vector<std::uint64_t> bits_;
};

}  // namespace terrace
