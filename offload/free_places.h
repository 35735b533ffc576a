/// Which places of a row are free: a bit each, so that none of them needs memory to become free again, and long rows
/// are searched soon. Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

namespace terrace {

class FreePlaces {
 public:
  FreePlaces() = default;  ///< of none
  /// So many, none of them free.
  explicit FreePlaces(std::uint64_t places);

  std::uint64_t places() const noexcept { return places_; }
  std::uint64_t count() const noexcept { return count_; }  ///< of free ones
  bool is_free(std::uint64_t place) const noexcept { return (bits_[place / word_bits] >> place % word_bits & 1U) != 0; }
  /// One that is not free becomes so, and the other way.
  void add(std::uint64_t place) noexcept;
  void take(std::uint64_t place) noexcept;

  /// The first free one from there on; `places()` where there is none.
  std::uint64_t next(std::uint64_t from) const noexcept;
  /// The first from there on that is not free; `places()` where there is none.
  std::uint64_t next_taken(std::uint64_t from) const noexcept;
  /// The first of so many free neighbours, the lowest; `places()` where there is no such run, or none is asked for.
  std::uint64_t first_of_run(std::uint64_t count) const noexcept;

 private:
  static constexpr std::uint64_t word_bits = 64;

  /// The first from there on whose bit is `free`.
  std::uint64_t find(std::uint64_t from, bool free) const noexcept;

  std::uint64_t places_ = 0;
  std::uint64_t count_ = 0;
  std::vector<std::uint64_t> bits_;
};

}  // namespace terrace
