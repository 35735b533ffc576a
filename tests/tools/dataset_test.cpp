#include "tools/dataset.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

class DatasetTest : public testing::Test {
 protected:
  DatasetTest() {
    std::string pattern = fs::temp_directory_path() / "terrace-dataset-XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~DatasetTest() override { fs::remove_all(folder_); }

  fs::path file(const std::string& name, const std::string& text) const {
    const fs::path path = folder_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }

  static std::string message_of(const std::vector<fs::path>& paths, std::int64_t sequence) {
    try {
      const Dataset dataset(paths, sequence);
    } catch (const ConfigError& error) {
      EXPECT_FALSE(error.hint().empty()) << error.what();
      return error.what();
    }
    ADD_FAILURE() << "no ConfigError";
    return "";
  }

  static std::string text_of(std::span<const std::uint8_t> bytes) { return {bytes.begin(), bytes.end()}; }

  fs::path folder_;
};

std::string counting(std::size_t length) {
  std::string text;
  for (std::size_t i = 0; i < length; ++i) text.push_back(static_cast<char>(i % 251));
  return text;
}

TEST_F(DatasetTest, holds_out_the_last_twentieth_of_a_file) {
  const std::string text = counting(2000);
  const Dataset dataset({file("a", text)}, 16);
  EXPECT_EQ(text_of(dataset.training()), text.substr(0, 1900));
  EXPECT_EQ(text_of(dataset.held_out()), text.substr(1900));
}

TEST_F(DatasetTest, holds_out_one_sequence_at_least) {
  const Dataset dataset({file("a", counting(100))}, 16);
  EXPECT_EQ(dataset.held_out().size(), 17U);
  EXPECT_EQ(dataset.held_out_sequences(), 1);
}

TEST_F(DatasetTest, reads_the_text_files_of_a_folder_and_no_others) {
  file("texts/b.py", std::string(100, 'b'));
  file("texts/deep/er/a.py", std::string(100, 'a'));
  file("texts/c.pyc", std::string(100, 'c') + '\0');
  fs::create_symlink("nowhere", folder_ / "texts/dangling");
  const Dataset dataset({folder_ / "texts"}, 4);
  std::string text = text_of(dataset.training()) + text_of(dataset.held_out());
  std::sort(text.begin(), text.end());
  EXPECT_EQ(text, std::string(100, 'a') + std::string(100, 'b'));
}

TEST_F(DatasetTest, reads_a_file_that_is_named_whatever_is_in_it) {
  const Dataset dataset({file("binary", std::string(100, '\0'))}, 4);
  EXPECT_EQ(dataset.training().size() + dataset.held_out().size(), 100U);
}

TEST_F(DatasetTest, reads_a_file_that_is_named_twice_once) {
  const fs::path path = file("texts/a", counting(100));
  const Dataset dataset({path, folder_ / "texts", path}, 4);
  EXPECT_EQ(dataset.training().size() + dataset.held_out().size(), 100U);
}

TEST_F(DatasetTest, where_a_folder_is_and_what_else_is_in_it_does_not_matter) {
  for (int i = 0; i < 20; ++i) {
    const std::string text(50, static_cast<char>('a' + i));
    file("one/" + std::to_string(i), text);
    file("moved/elsewhere/" + std::to_string(i), text);
  }
  file("moved/elsewhere/cache", std::string(10, '\0'));
  const Dataset one({folder_ / "one"}, 8);
  const Dataset moved({folder_ / "moved"}, 8);
  EXPECT_EQ(text_of(one.training()), text_of(moved.training()));
  EXPECT_EQ(text_of(one.held_out()), text_of(moved.held_out()));
}

TEST_F(DatasetTest, holds_out_other_files_than_those_that_come_last_by_name) {
  for (int i = 0; i < 20; ++i) file("texts/" + std::string(1, static_cast<char>('a' + i)), std::string(100, 'a' + i));
  const Dataset dataset({folder_ / "texts"}, 8);
  EXPECT_NE(text_of(dataset.held_out()), std::string(100, 'a' + 19));
}

TEST_F(DatasetTest, reads_no_more_than_it_was_told) {
  file("texts/a", std::string(300, 'a'));
  file("texts/b", std::string(300, 'b'));
  const Dataset dataset({folder_ / "texts"}, 8, 400);
  EXPECT_EQ(dataset.training().size() + dataset.held_out().size(), 400U);
}

TEST_F(DatasetTest, targets_are_the_tokens_that_follow) {
  const Dataset dataset({file("a", counting(2000))}, 16);
  std::mt19937_64 generator(7);
  for (const Batch& batch : {dataset.training_batch(generator, 3), dataset.held_out_batch(0, 2, 3)}) {
    ASSERT_EQ(batch.tokens.sizes(), (std::vector<std::int64_t>{3, 16}));
    ASSERT_EQ(batch.targets.sizes(), batch.tokens.sizes());
    EXPECT_EQ(batch.tokens.dtype(), at::kLong);
    EXPECT_TRUE(at::equal((batch.tokens + 1).remainder(251), batch.targets));
  }
}

TEST_F(DatasetTest, one_seed_draws_the_same_batches_whatever_libtorch_draws) {
  const Dataset dataset({file("a", counting(2000))}, 16);
  std::mt19937_64 first(7);
  std::mt19937_64 second(7);
  const Batch before = dataset.training_batch(first, 4);
  at::rand({100});
  EXPECT_TRUE(at::equal(before.tokens, dataset.training_batch(second, 4).tokens));
  EXPECT_FALSE(at::equal(before.tokens, dataset.training_batch(second, 4).tokens));
}

TEST_F(DatasetTest, training_batches_never_touch_held_out_bytes) {
  const Dataset dataset({file("a", std::string(95, 'a') + std::string(5, 'z'))}, 4);
  std::mt19937_64 generator(1);
  const Batch batch = dataset.training_batch(generator, 2000);
  EXPECT_TRUE(batch.targets.eq('a').all().item<bool>());
}

TEST_F(DatasetTest, held_out_batches_cover_every_sequence_once) {
  const Dataset dataset({file("a", counting(2000))}, 16);
  ASSERT_EQ(dataset.held_out_sequences(), 6);
  std::vector<at::Tensor> parts;
  for (int i = 0; i < 3; ++i) parts.push_back(dataset.held_out_batch(i, 3, 2).tokens);
  std::vector<std::int64_t> expected;
  for (const std::uint8_t byte : dataset.held_out().first(6 * 16)) expected.push_back(byte);
  EXPECT_TRUE(at::equal(at::cat(parts).flatten(), at::tensor(expected)));
  EXPECT_THROW(dataset.held_out_batch(0, 4, 2), LogicError);
}

TEST_F(DatasetTest, refuses_what_it_cannot_learn_from_and_names_it) {
  EXPECT_THAT(message_of({folder_ / "missing"}, 4), AllOf(HasSubstr("missing"), HasSubstr("no such file")));
  EXPECT_THAT(message_of({file("empty", "")}, 4), AllOf(HasSubstr("empty"), HasSubstr("no text")));
  fs::create_directories(folder_ / "hollow");
  EXPECT_THAT(message_of({folder_ / "hollow"}, 4), AllOf(HasSubstr("hollow"), HasSubstr("no text")));
  EXPECT_THAT(message_of({file("short", "123456789")}, 4), AllOf(HasSubstr("short"), HasSubstr("9 bytes")));
  EXPECT_THAT(message_of({"/dev/null"}, 4), AllOf(HasSubstr("/dev/null"), HasSubstr("neither")));
  EXPECT_THAT(message_of({}, 4), HasSubstr("--data"));
  EXPECT_NO_THROW(Dataset({file("enough", "1234567890")}, 4));
}

TEST(ByteCounts, entropy_is_in_nats) {
  ByteCounts counts;
  EXPECT_EQ(counts.entropy(), 0);
  counts.add(at::tensor({std::int64_t{1}, std::int64_t{1}}));
  EXPECT_EQ(counts.entropy(), 0);
  counts.add(at::tensor({std::int64_t{0}, std::int64_t{255}}));
  EXPECT_NEAR(counts.entropy(), 1.5 * std::log(2.0), 1e-12);
}

}  // namespace
}  // namespace terrace
