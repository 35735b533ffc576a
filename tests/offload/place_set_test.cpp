#include "offload/place_set.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace terrace {
namespace {

PlaceSet of(std::uint64_t places, const std::vector<std::uint64_t>& contained) {
  PlaceSet set(places);
  for (const std::uint64_t place : contained) set.insert(place);
  return set;
}

TEST(PlaceSet, is_empty_at_first) {
  EXPECT_EQ(PlaceSet().next(0), 0U);
  const PlaceSet none(100);
  EXPECT_EQ(none.count(), 0U);
  EXPECT_EQ(none.next(0), 100U);
  EXPECT_EQ(none.first_of_run(1), 100U);
}

TEST(PlaceSet, counts_each_place_once) {
  PlaceSet set = of(100, {7, 7, 8});
  EXPECT_EQ(set.count(), 2U);
  set.erase(9);
  EXPECT_EQ(set.count(), 2U);
  set.erase(7);
  set.erase(7);
  EXPECT_EQ(set.count(), 1U);
}

TEST(PlaceSet, finds_the_lowest_run_also_across_words_and_up_to_the_end) {
  const PlaceSet some = of(130, {3, 4, 62, 63, 64, 65, 128, 129});
  EXPECT_EQ(some.first_of_run(1), 3U);
  EXPECT_EQ(some.first_of_run(2), 3U);
  EXPECT_EQ(some.first_of_run(3), 62U);
  EXPECT_EQ(some.first_of_run(4), 62U);
  EXPECT_EQ(some.first_of_run(5), 130U);
  EXPECT_EQ(of(130, {128, 129}).first_of_run(2), 128U);
  EXPECT_EQ(some.first_of_run(0), 130U) << "none is asked for";
}

TEST(PlaceSet, may_be_full) {
  for (const std::uint64_t places : {64U, 128U, 130U}) {
    PlaceSet set(places);
    for (std::uint64_t place = 0; place < places; ++place) set.insert(place);
    EXPECT_EQ(set.next_missing(0), places);
    EXPECT_EQ(set.next_missing(5, 60), 60U);
    EXPECT_EQ(set.first_of_run(places), 0U);
    EXPECT_EQ(set.first_of_run(places + 1), places);
    set.erase(places - 1);
    EXPECT_EQ(set.next_missing(0), places - 1);
    EXPECT_EQ(set.next(places - 1), places);
  }
}

TEST(PlaceSet, is_as_a_plain_list_of_them_says) {
  constexpr std::uint64_t places = 200;
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  PlaceSet set(places);
  std::vector<bool> expected(places, false);
  const auto first = [&](std::uint64_t from, bool value) {
    while (from < places && expected[from] != value) ++from;
    return from;
  };
  for (int i = 0; i < 5000; ++i) {
    const std::uint64_t place = random() % places;
    expected[place] ? set.erase(place) : set.insert(place);
    expected[place] = !expected[place];
    const std::uint64_t from = random() % (places + 1);
    const std::uint64_t end = from + random() % (places + 1 - from);
    ASSERT_EQ(set.next(from), first(from, true));
    ASSERT_EQ(set.next(from, end), std::min(end, first(from, true)));
    ASSERT_EQ(set.next_missing(from), first(from, false));
    ASSERT_EQ(set.next_missing(from, end), std::min(end, first(from, false)));
    ASSERT_EQ(set.count(), static_cast<std::uint64_t>(std::count(expected.begin(), expected.end(), true)));
    ASSERT_EQ(set.contains(place), expected[place]);
    const std::uint64_t run = 1 + random() % 6;
    const auto found = std::search_n(expected.begin(), expected.end(), static_cast<int>(run), true);
    ASSERT_EQ(set.first_of_run(run), static_cast<std::uint64_t>(found - expected.begin()));
  }
}

}  // namespace
}  // namespace terrace
