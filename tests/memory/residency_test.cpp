#include "memory/residency.h"

#include <array>
#include <map>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "base/error.h"

namespace terrace {
namespace {

using enum CopyState;

constexpr std::array<CopyState, 5> all_states{absent, reserved, arriving, valid, leaving};
constexpr std::array<CopyStep, 8> all_steps{CopyStep::reserve,   CopyStep::arrive, CopyStep::arrived, CopyStep::failed,
                                            CopyStep::supersede, CopyStep::leave,  CopyStep::stay,    CopyStep::vacate};

/// The whole table, written out a second time.
const std::map<std::pair<CopyState, CopyStep>, CopyState> table{
    {{absent, CopyStep::reserve}, reserved},  {{reserved, CopyStep::arrive}, arriving},
    {{arriving, CopyStep::arrived}, valid},   {{arriving, CopyStep::failed}, reserved},
    {{valid, CopyStep::supersede}, reserved}, {{valid, CopyStep::leave}, leaving},
    {{leaving, CopyStep::stay}, valid},       {{valid, CopyStep::vacate}, absent},
    {{leaving, CopyStep::vacate}, absent},    {{reserved, CopyStep::vacate}, absent},
};

Residency chunk_with(CopyState state) {
  Residency chunk(ChunkInfo{});
  const auto take = [&](std::initializer_list<CopyStep> steps) {
    for (const CopyStep step : steps) chunk.step(Tier::host, step);
  };
  switch (state) {
    case absent:
      break;
    case reserved:
      take({CopyStep::reserve});
      break;
    case arriving:
      take({CopyStep::reserve, CopyStep::arrive});
      break;
    case valid:
      take({CopyStep::reserve, CopyStep::arrive, CopyStep::arrived});
      break;
    case leaving:
      take({CopyStep::reserve, CopyStep::arrive, CopyStep::arrived, CopyStep::leave});
      break;
  }
  return chunk;
}

TEST(Residency, every_listed_step_moves_and_every_other_throws_and_changes_nothing) {
  for (const CopyState state : all_states) {
    for (const CopyStep step : all_steps) {
      SCOPED_TRACE(std::string(name_of(state)) + " " + std::string(name_of(step)));
      Residency chunk = chunk_with(state);
      ASSERT_EQ(chunk.at(Tier::host).state, state);
      const auto listed = table.find({state, step});
      if (listed != table.end()) {
        EXPECT_EQ(next_state(state, step), listed->second);
        chunk.step(Tier::host, step);
        EXPECT_EQ(chunk.at(Tier::host).state, listed->second);
      } else {
        EXPECT_THROW(next_state(state, step), LogicError);
        EXPECT_THROW(chunk.step(Tier::host, step), LogicError);
        EXPECT_EQ(chunk.at(Tier::host).state, state);
      }
      EXPECT_EQ(chunk.at(Tier::device).state, absent);
      EXPECT_EQ(chunk.at(Tier::nvme).state, absent);
    }
  }
}

TEST(Residency, an_illegal_step_is_named_with_the_state_that_forbids_it) {
  try {
    next_state(arriving, CopyStep::vacate);
    FAIL() << "an arriving copy cannot be vacated";
  } catch (const LogicError& error) {
    EXPECT_NE(error.message().find("arriving"), std::string::npos) << error.what();
    EXPECT_NE(error.message().find("vacate"), std::string::npos) << error.what();
  }
}

TEST(Residency, states_and_steps_have_names_of_their_own) {
  std::map<std::string_view, int> names;
  for (const CopyState state : all_states) ++names[name_of(state)];
  for (const CopyStep step : all_steps) ++names[name_of(step)];
  EXPECT_EQ(names.size(), all_states.size() + all_steps.size());
}

TEST(Residency, a_chunk_has_bytes_while_a_copy_is_valid_or_leaving) {
  for (const CopyState state : all_states) {
    const bool readable = state == valid || state == leaving;
    const Residency chunk = chunk_with(state);
    EXPECT_EQ(chunk.at(Tier::host).readable(), readable) << name_of(state);
    EXPECT_EQ(chunk.has_bytes(), readable) << name_of(state);
  }
}

TEST(Residency, a_copy_is_spare_while_a_tier_nearer_home_has_the_bytes_too) {
  for (const Tier home : all_tiers) {
    for (const Tier copy : all_tiers) {
      for (const Tier other : all_tiers) {
        if (other == copy) continue;
        Residency chunk(ChunkInfo{.kind = Kind::parameter, .index = 0, .bytes = 4096, .home = home, .room_bytes = {}});
        for (const Tier tier : {copy, other}) chunk.at(tier).state = valid;
        const bool on_the_way = (copy < other && other <= home) || (home <= other && other < copy);
        EXPECT_EQ(chunk.is_spare(copy), on_the_way)
            << name_of(copy) << " and " << name_of(other) << ", at home on " << name_of(home);
      }
    }
  }
}

TEST(Residency, a_chunk_is_in_flight_while_a_copy_arrives_or_is_read_by_a_transfer) {
  EXPECT_TRUE(chunk_with(arriving).in_flight());
  Residency chunk = chunk_with(valid);
  EXPECT_FALSE(chunk.in_flight());
  chunk.at(Tier::host).outgoing = 1;
  EXPECT_TRUE(chunk.in_flight());
}

TEST(Residency, pins_are_told_apart_by_tier_and_by_whether_they_change_bytes) {
  Residency chunk = chunk_with(valid);
  EXPECT_FALSE(chunk.pinned());
  chunk.at(Tier::host).pins = 1;
  EXPECT_TRUE(chunk.pinned());
  EXPECT_TRUE(chunk.pinned_elsewhere(Tier::device));
  EXPECT_FALSE(chunk.pinned_elsewhere(Tier::host));
  EXPECT_FALSE(chunk.changing_elsewhere(Tier::device));
  chunk.at(Tier::host).write_pins = 1;
  EXPECT_TRUE(chunk.changing_elsewhere(Tier::device));
  EXPECT_FALSE(chunk.changing_elsewhere(Tier::host));
}

}  // namespace
}  // namespace terrace
