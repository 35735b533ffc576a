#include "offload/place_set.h"

#include <algorithm>
#include <bit>

namespace terrace {

PlaceSet::PlaceSet(std::uint64_t places) : places_(places), bits_((places + word_bits - 1) / word_bits) {}

void PlaceSet::insert(std::uint64_t place) noexcept {
  count_ += contains(place) ? 0 : 1;
  bits_[place / word_bits] |= std::uint64_t{1} << place % word_bits;
}

void PlaceSet::erase(std::uint64_t place) noexcept {
  count_ -= contains(place) ? 1 : 0;
  bits_[place / word_bits] &= ~(std::uint64_t{1} << place % word_bits);
}

std::uint64_t PlaceSet::next(std::uint64_t from, std::uint64_t end) const noexcept { return find(from, end, true); }

std::uint64_t PlaceSet::next_missing(std::uint64_t from, std::uint64_t end) const noexcept {
  return find(from, end, false);
}

std::uint64_t PlaceSet::find(std::uint64_t from, std::uint64_t end, bool contained) const noexcept {
  end = std::min(end, places_);
  std::uint64_t before = from % word_bits;  // bits of the first word that do not count
  for (std::uint64_t word = from / word_bits; word * word_bits < end; ++word) {
    const std::uint64_t found = (contained ? bits_[word] : ~bits_[word]) >> before << before;
    if (found != 0) {
      return std::min(end, word * word_bits + static_cast<std::uint64_t>(std::countr_zero(found)));
    }
    before = 0;
  }
  return end;
}

std::uint64_t PlaceSet::first_of_run(std::uint64_t count) const noexcept {
  if (count == 0 || count > count_) return places_;
  for (std::uint64_t first = next(0); first < places_;) {
    const std::uint64_t end = next_missing(first);
    if (end - first >= count) return first;
    first = next(end);
  }
  return places_;
}

}  // namespace terrace
