#include "memory/schedule.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

namespace terrace {
namespace {

constexpr ChunkAccess read_of(ChunkId chunk) { return {chunk, Tier::device, Access::read}; }

Schedule sequence(const std::vector<ChunkId>& chunks) {
  std::vector<Schedule::Entry> entries;
  for (const ChunkId chunk : chunks) entries.push_back({.chunk = chunk});
  return Schedule(std::move(entries));
}

/// Chunks 0, 1, ... in order, each once.
Schedule ascending(ChunkId count) {
  std::vector<ChunkId> chunks;
  for (ChunkId chunk = 0; chunk < count; ++chunk) chunks.push_back(chunk);
  return sequence(chunks);
}

TEST(Schedule, finds_the_next_use_of_a_chunk) {
  const Schedule schedule = sequence({7, 8, 7, 9});
  EXPECT_EQ(schedule.next_use(7, 0), 0u);
  EXPECT_EQ(schedule.next_use(7, 1), 2u);
  EXPECT_EQ(schedule.next_use(7, 3), std::nullopt);
  EXPECT_EQ(schedule.next_use(1, 0), std::nullopt);
}

TEST(Schedule, knows_the_programs_peak_in_any_stretch) {
  std::vector<Schedule::Entry> entries;
  for (std::uint64_t i = 0; i < 300; ++i) entries.push_back({.chunk = 1, .program_bytes = (i * 7919) % 1000});
  const Schedule schedule(entries);
  for (std::size_t from = 0; from < 300; from += 13) {
    std::uint64_t peak = 0;
    for (std::size_t to = from; to < 300; ++to) {
      peak = std::max(peak, entries[to].program_bytes);
      ASSERT_EQ(schedule.program_peak(from, to), peak) << from << " to " << to;
    }
  }
}

TEST(Forecast, counts_to_the_next_use_around_the_end_of_the_pass) {
  const Schedule schedule = sequence({1, 2, 3, 1});
  Forecast forecast;
  EXPECT_EQ(forecast.distance(1), Forecast::never) << "nothing is known";
  forecast.follow(&schedule);
  forecast.advance(1);
  forecast.advance(2);
  EXPECT_EQ(forecast.distance(3), 0u);
  EXPECT_EQ(forecast.distance(1), 1u);
  EXPECT_EQ(forecast.distance(2), 3u) << "in the next pass";
  EXPECT_EQ(forecast.distance(4), Forecast::never);
  EXPECT_TRUE(forecast.used_again(1));
  EXPECT_FALSE(forecast.used_again(2));
}

TEST(Forecast, a_chunk_is_in_use_until_the_last_of_its_accesses_in_a_row) {
  const Schedule schedule({{.chunk = 1, .accesses = 3}, {.chunk = 2}});
  Forecast forecast;
  forecast.follow(&schedule);
  forecast.advance(1);
  forecast.advance(1);
  EXPECT_TRUE(forecast.used_again(1));
  EXPECT_EQ(forecast.distance(1), 0u);
  EXPECT_EQ(forecast.distance(2), 0u) << "it comes next";
  forecast.advance(1);
  EXPECT_FALSE(forecast.used_again(1));
  EXPECT_EQ(forecast.distance(1), 1u) << "in the next pass";
}

TEST(Forecast, a_program_that_leaves_out_one_of_several_accesses_is_followed_all_the_same) {
  const Schedule schedule({{.chunk = 1, .accesses = 3}, {.chunk = 2}, {.chunk = 3}});
  Forecast forecast;
  forecast.follow(&schedule);
  forecast.advance(1);
  forecast.advance(2);
  EXPECT_EQ(forecast.cursor(), 2u);
  EXPECT_FALSE(forecast.used_again(1));
}

TEST(Forecast, follows_a_program_that_skips_a_layer) {
  const Schedule schedule = ascending(100);
  Forecast forecast;
  forecast.follow(&schedule);
  for (ChunkId chunk = 0; chunk < 10; ++chunk) forecast.advance(chunk);
  forecast.advance(20);
  EXPECT_EQ(forecast.cursor(), 21u);
}

TEST(Forecast, a_far_jump_is_believed_when_the_next_access_confirms_it) {
  const Schedule schedule = ascending(200);
  Forecast forecast;
  forecast.follow(&schedule);
  forecast.advance(0);
  forecast.advance(150);
  EXPECT_EQ(forecast.cursor(), 1u) << "one use out of order is no jump";
  forecast.advance(151);
  EXPECT_EQ(forecast.cursor(), 152u);
}

TEST(Forecast, a_single_access_out_of_order_does_not_lose_the_place) {
  const Schedule schedule = ascending(200);
  Forecast forecast;
  forecast.follow(&schedule);
  for (ChunkId chunk = 0; chunk < 10; ++chunk) forecast.advance(chunk);
  forecast.advance(180);
  for (ChunkId chunk = 10; chunk < 20; ++chunk) forecast.advance(chunk);
  EXPECT_EQ(forecast.cursor(), 20u);
}

TEST(Forecast, a_pass_that_begins_anew_is_followed_from_its_beginning) {
  const Schedule schedule = ascending(200);
  Forecast forecast;
  forecast.follow(&schedule);
  for (ChunkId chunk = 0; chunk < 100; ++chunk) forecast.advance(chunk);
  forecast.advance(0);
  forecast.advance(1);
  EXPECT_EQ(forecast.cursor(), 2u);
}

TEST(ScheduleBook, remembers_a_pass_by_its_key) {
  ScheduleBook book;
  book.begin_pass(1);
  EXPECT_EQ(book.current(), nullptr);
  book.record(read_of(4), 10);
  book.record(read_of(5), 20);
  book.end_step();
  ASSERT_NE(book.current(), nullptr) << "the next is taken to be like the last";
  EXPECT_EQ(book.current()->size(), 2u);

  book.begin_pass(2);
  book.record(read_of(6), 0);
  book.begin_pass(1);
  ASSERT_NE(book.current(), nullptr);
  EXPECT_EQ((*book.current())[0].chunk, 4u);
  book.begin_pass(2);
  ASSERT_NE(book.current(), nullptr);
  EXPECT_EQ((*book.current())[0].chunk, 6u);
}

TEST(ScheduleBook, accesses_to_one_chunk_in_a_row_are_one_with_the_highest_use_of_memory) {
  ScheduleBook book;
  book.begin_pass(1);
  book.record(read_of(4), 10);
  book.record({4, Tier::device, Access::write}, 5);
  book.note_program_bytes(70);
  book.record(read_of(5), 1);
  book.end_step();
  ASSERT_EQ(book.current()->size(), 2u);
  EXPECT_EQ((*book.current())[0].program_bytes, 70u);
  EXPECT_EQ((*book.current())[0].mode, Access::write);
  EXPECT_EQ((*book.current())[0].accesses, 2u);
  EXPECT_EQ((*book.current())[1].accesses, 1u);
}

TEST(ScheduleBook, keeps_the_latest_few_passes) {
  ScheduleBook book;
  for (ScheduleBook::Key key = 1; key <= 20; ++key) {
    book.begin_pass(key);
    book.record(read_of(static_cast<ChunkId>(key)), 0);
  }
  book.begin_pass(19);
  EXPECT_EQ((*book.current())[0].chunk, 19u);
  book.begin_pass(1);
  EXPECT_NE((*book.current())[0].chunk, 1u);
}

TEST(ScheduleBook, takes_a_pass_that_is_new_to_be_like_the_latest) {
  ScheduleBook book;
  book.begin_pass(1);
  book.record(read_of(4), 0);
  book.begin_pass(2);
  ASSERT_NE(book.current(), nullptr);
  const Schedule* const latest = book.current();
  EXPECT_EQ((*latest)[0].chunk, 4u);
  book.record(read_of(5), 0);
  book.begin_pass(3);
  ASSERT_NE(book.current(), nullptr);
  EXPECT_NE(book.current(), latest) << "it is to be followed from its beginning";
  EXPECT_EQ((*book.current())[0].chunk, 5u);
}

void record_all(ScheduleBook& book, const std::vector<ChunkId>& chunks) {
  for (const ChunkId chunk : chunks) book.record(read_of(chunk), 0);
}

std::vector<ChunkId> chunks_of(const Schedule* schedule) {
  std::vector<ChunkId> chunks;
  for (std::size_t i = 0; schedule != nullptr && i < schedule->size(); ++i) chunks.push_back((*schedule)[i].chunk);
  return chunks;
}

using Progress = ScheduleBook::Progress;
constexpr auto repetition = ScheduleBook::End::repetition;

TEST(ScheduleBook, an_evaluation_is_over_when_it_begins_anew_and_later_with_its_last_access) {
  ScheduleBook book;
  book.begin_pass(1, repetition);
  record_all(book, {1, 2, 1, 3, 1, 2, 1, 3});
  EXPECT_EQ(book.current(), nullptr) << "the last chunk may be used some more";
  EXPECT_EQ(book.record(read_of(1), 0), Progress::was_over);
  EXPECT_EQ(chunks_of(book.current()), (std::vector<ChunkId>{1, 2, 1, 3}));
  EXPECT_FALSE(book.current()->ends_with_step());
  for (int i = 0; i < 3; ++i) {
    if (i > 0) {
      EXPECT_EQ(book.record(read_of(1), 0), Progress::goes_on);
    }
    EXPECT_EQ(book.record(read_of(2), 0), Progress::goes_on);
    EXPECT_EQ(book.record(read_of(1), 0), Progress::goes_on);
    EXPECT_EQ(book.record(read_of(3), 0), Progress::is_over);
  }
}

TEST(ScheduleBook, an_evaluation_whose_last_chunk_is_its_first_is_told_from_the_next) {
  ScheduleBook book;
  book.begin_pass(1, repetition);
  record_all(book, {1, 2, 3, 1, /* the next */ 1, 2, 3, 1});
  EXPECT_EQ(book.record(read_of(1), 0), Progress::goes_on) << "as much of it as before";
  EXPECT_EQ(book.record(read_of(2), 0), Progress::goes_on);
  EXPECT_EQ(chunks_of(book.current()), (std::vector<ChunkId>{1, 2, 3}));
}

TEST(ScheduleBook, an_evaluation_that_is_another_once_is_followed_again_afterwards) {
  ScheduleBook book;
  book.begin_pass(1, repetition);
  record_all(book, {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4});
  record_all(book, {1, 3, 4});  // a layer is left out
  record_all(book, {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4});
  EXPECT_EQ(book.current()->size() % 4, 0u);
  EXPECT_EQ(chunks_of(book.current()).size(), 4u);
}

TEST(ScheduleBook, micro_batches_that_are_alike_are_one_pass_until_the_step) {
  ScheduleBook book;
  book.begin_pass(1);
  for (int i = 0; i < 5; ++i) record_all(book, {1, 2, 3});
  book.end_step();
  EXPECT_EQ(book.current()->size(), 15u);
  EXPECT_TRUE(book.current()->ends_with_step());
}

TEST(ScheduleBook, a_program_that_never_ends_a_step_is_known_by_the_stretch_that_it_repeats) {
  ScheduleBook book;
  book.begin_pass(1);
  std::size_t recorded = 0;
  for (; recorded <= ScheduleBook::most_entries; recorded += 5) record_all(book, {1, 2, 1, 3, 4});
  const std::vector<ChunkId> chunks = chunks_of(book.current());
  ASSERT_EQ(chunks.size(), 5u);
  EXPECT_EQ(std::count(chunks.begin(), chunks.end(), 1), 2);
}

TEST(ScheduleBook, of_a_pass_that_never_ends_and_never_repeats_nothing_is_kept) {
  ScheduleBook book;
  book.begin_pass(1);
  for (std::size_t i = 0; i < 3 * ScheduleBook::most_entries; ++i) {
    book.record(read_of(static_cast<ChunkId>(i % (2 * ScheduleBook::most_entries))), 0);
  }
  EXPECT_EQ(book.current(), nullptr);
}

TEST(ScheduleBook, what_runs_without_a_graph_amid_a_step_is_of_it) {
  ScheduleBook book;
  for (int step = 0; step < 2; ++step) {
    EXPECT_TRUE(book.begin_pass(1, ScheduleBook::End::step, 1));
    record_all(book, {1, 2});
    EXPECT_FALSE(book.begin_pass(2, repetition, 3)) << "a function of the program's own";
    record_all(book, {3, 4, 3, 4, 3, 4, 3, 4});
    book.end_step();
    EXPECT_EQ(chunks_of(book.current()), (std::vector<ChunkId>{1, 2, 3, 4, 3, 4, 3, 4, 3, 4}));
    EXPECT_TRUE(book.current()->ends_with_step());
  }
  EXPECT_TRUE(book.begin_pass(2, repetition, 3)) << "after a step it is an evaluation";
}

TEST(ScheduleBook, a_step_may_begin_without_a_graph) {
  ScheduleBook book;
  for (int step = 0; step < 3; ++step) {
    EXPECT_TRUE(book.begin_pass(1, repetition, 1));
    record_all(book, {1, 2});
    EXPECT_FALSE(book.begin_pass(2, ScheduleBook::End::step, 3));
    record_all(book, {3, 2});
    EXPECT_FALSE(book.begin_pass(1, repetition, 1)) << "another micro-batch of it";
    record_all(book, {1, 2, 3});
    EXPECT_EQ(book.record(read_of(2), 0), Progress::goes_on);
    book.end_step();
    EXPECT_EQ(chunks_of(book.current()), (std::vector<ChunkId>{1, 2, 3, 2, 1, 2, 3, 2}));
  }
}

TEST(ScheduleBook, a_pass_that_turns_out_to_train_is_not_over_before_its_step) {
  ScheduleBook book;
  for (int step = 0; step < 3; ++step) {
    book.begin_pass(1, repetition, 1);
    record_all(book, {1, 2, 3});
    book.expect_step();
    record_all(book, {3, 2});
    EXPECT_EQ(book.record(read_of(1), 0), Progress::goes_on);
    book.end_step();
    EXPECT_TRUE(book.current()->ends_with_step());
  }
}

TEST(ScheduleBook, what_begins_where_the_pass_began_or_after_an_evaluation_is_over_is_another) {
  ScheduleBook book;
  book.begin_pass(1, ScheduleBook::End::step, 1);
  record_all(book, {1, 2, 3});
  EXPECT_TRUE(book.begin_pass(2, repetition, 1)) << "it evaluates with what was trained";
  record_all(book, {1, 2, 3, 1, 2, 3, 1, 2, 3});
  EXPECT_TRUE(book.begin_pass(3, ScheduleBook::End::step, 5)) << "another model trains";
}

TEST(ScheduleBook, takes_models_that_train_in_turn_to_do_so_again) {
  ScheduleBook book;
  const auto step = [&](ScheduleBook::Key key) {
    book.begin_pass(key);
    record_all(book, {static_cast<ChunkId>(key)});
    book.end_step();
  };
  for (const ScheduleBook::Key key : {1, 2, 1, 2, 1}) step(key);
  EXPECT_EQ(chunks_of(book.current()), (std::vector<ChunkId>{2}));
  step(2);
  EXPECT_EQ(chunks_of(book.current()), (std::vector<ChunkId>{1}));
}

TEST(ScheduleBook, what_follows_a_step_once_is_not_taken_to_follow_the_next) {
  ScheduleBook book;
  const auto step = [&] {
    book.begin_pass(1);
    record_all(book, {1});
    book.end_step();
  };
  for (int i = 0; i < 3; ++i) step();
  for (int i = 0; i < 2; ++i) {
    book.begin_pass(2, repetition);  // as some evaluate every few steps
    record_all(book, {2});
    for (int j = 0; j < 3; ++j) {
      step();
      EXPECT_EQ(chunks_of(book.current()), (std::vector<ChunkId>{1}));
    }
  }
}

TEST(ScheduleBook, what_comes_between_a_step_and_a_pass_is_of_neither) {
  ScheduleBook book;
  book.begin_pass(1);
  record_all(book, {1, 2, 3});
  book.end_step();
  record_all(book, {9});
  book.begin_pass(2);
  record_all(book, {4});
  book.begin_pass(1);
  EXPECT_EQ(chunks_of(book.current()), (std::vector<ChunkId>{1, 2, 3}));
}

}  // namespace
}  // namespace terrace
