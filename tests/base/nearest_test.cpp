#include "base/nearest.h"

#include <vector>

#include <gtest/gtest.h>

namespace terrace {
namespace {

TEST(EditDistance, counts_inserts_deletes_replacements_and_swaps) {
  EXPECT_EQ(edit_distance("memory", "memory"), 0U);
  EXPECT_EQ(edit_distance("memry", "memory"), 1U);
  EXPECT_EQ(edit_distance("memoryy", "memory"), 1U);
  EXPECT_EQ(edit_distance("memary", "memory"), 1U);
  EXPECT_EQ(edit_distance("memroy", "memory"), 1U);
  EXPECT_EQ(edit_distance("", "memory"), 6U);
  EXPECT_EQ(edit_distance("memory", ""), 6U);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
}

const std::vector<std::string> kNames = {"device.kind",          "device.memory", "host.memory",
                                         "placement.parameters", "model.layers",  "train.steps"};

TEST(NearestName, finds_the_name_with_a_slip) {
  EXPECT_EQ(nearest_name("device.memroy", kNames), "device.memory");
  EXPECT_EQ(nearest_name("hots.memory", kNames), "host.memory");
  EXPECT_EQ(nearest_name("train.step", kNames), "train.steps");
}

TEST(NearestName, finds_the_name_in_another_table) { EXPECT_EQ(nearest_name("train.layers", kNames), "model.layers"); }

TEST(NearestName, finds_the_name_without_its_table) { EXPECT_EQ(nearest_name("layers", kNames), "model.layers"); }

TEST(NearestName, finds_the_name_with_one_part_too_many) {
  EXPECT_EQ(nearest_name("placement.parameters.device", kNames), "placement.parameters");
}

TEST(NearestName, is_empty_where_there_are_no_names) { EXPECT_EQ(nearest_name("anything", {}), ""); }

}  // namespace
}  // namespace terrace
