// What was learned of a model is kept from run to run, and a file that does not hold such is not believed.

#include "integration/model_notes.h"

#include <filesystem>
#include <string>
#include <sys/stat.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/log.h"
#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

using testing::HasSubstr;

class ModelNotesTest : public testing::Test {
 protected:
  void SetUp() override { set_log_level(LogLevel::info); }

  /// What is loaded where the file holds this.
  std::optional<ModelNotes> loaded(const std::string& text) {
    path_ = folder_.write("models/model.json", text);
    testing::internal::CaptureStderr();
    const std::optional<ModelNotes> notes = ModelNotesFile(path_, 3).load();
    logged_ = testing::internal::GetCapturedStderr();
    return notes;
  }

  TemporaryFolder folder_;
  std::filesystem::path path_;
  std::string logged_;
};

TEST_F(ModelNotesTest, give_back_what_was_saved_last) {
  const ModelNotesFile file(folder_.path() / "terrace" / "models" / "model.json", 3);
  EXPECT_EQ(file.load(), std::nullopt);
  testing::internal::CaptureStderr();
  const ModelNotes all{.gradients_read_once = true,
                       .forward_seconds = 0.125,
                       .backward_seconds = 0.3,
                       .order = {2, 0, 1},
                       .device_bytes = 1ULL << 40,
                       .most_operands = 7};
  file.save(all);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("the next run places this model by"));
  EXPECT_EQ(file.load(), all);
  file.save({});
  EXPECT_EQ(file.load(), ModelNotes());
}

TEST_F(ModelNotesTest, of_a_large_model_give_back_its_order) {
  constexpr std::uint32_t count = 300'000;
  const ModelNotesFile file(folder_.path() / "model.json", count);
  ModelNotes notes;
  for (std::uint32_t i = 0; i < count; ++i) notes.order.push_back(count - 1 - i);
  file.save(notes);
  EXPECT_EQ(file.load(), notes);
}

TEST_F(ModelNotesTest, are_removed_with_a_line_where_they_are_none) {
  const auto notes = [](const std::string& version, const std::string& once, const std::string& order) {
    return R"({"version": )" + version + R"(, "gradients_read_once": )" + once +
           R"(, "forward_seconds": 1, "backward_seconds": 2, "order": )" + order +
           R"(, "device_bytes": 5, "most_operands": 1})";
  };
  EXPECT_EQ(loaded(notes("2", "true", "[1, 0, 2]")), (ModelNotes{.gradients_read_once = true,
                                                                 .forward_seconds = 1,
                                                                 .backward_seconds = 2,
                                                                 .order = {1, 0, 2},
                                                                 .device_bytes = 5,
                                                                 .most_operands = 1}));
  EXPECT_EQ(logged_, "");
  std::vector<std::string> texts{
      std::string(),
      std::string("{"),
      std::string("[]"),
      std::string(R"({"version": 2})"),
      notes("2", "1", "[]"),
      notes("1", "true", "[]"),
      notes("2", "true", "5"),
      notes("2", "true", "[0, 1]"),
      notes("2", "true", "[0, 1, 3]"),
      notes("2", "true", "[0, 1, 1]"),
      notes("2", "true", "[0, 1, 2, 3]"),
      notes("2", "true", "[0, 1, -1]"),
      notes("2", "true", "[4294967296, 1, 2]"),
      notes("2", "true", "[0.5, 1, 2]"),
      notes("2", "true", "null"),
      std::string(R"({"version": 2, "gradients_read_once": true, "forward_seconds": 1, "backward_seconds": 2, )"
                  R"("order": [], "device_bytes": 5, "most_operands": 18446744073709551615})"),
      notes("2", "true", "[]") + std::string(5000, ' ')};
  texts.push_back(R"({"version": )");
  texts.back().append(1 << 20, '[');
  for (const std::string& text : texts) {
    EXPECT_EQ(loaded(text), std::nullopt) << text.substr(0, 120);
    EXPECT_THAT(logged_, HasSubstr("is of no use")) << text.substr(0, 120);
    EXPECT_FALSE(std::filesystem::exists(path_)) << text.substr(0, 120);
  }
}

TEST_F(ModelNotesTest, that_no_run_can_have_made_are_removed_too) {
  for (const char* const text :
       {R"({"version": 2, "gradients_read_once": true, "forward_seconds": -1, "backward_seconds": 2, "order": [],
            "device_bytes": 5, "most_operands": 1})",
        R"({"version": 2, "gradients_read_once": true, "forward_seconds": 1, "backward_seconds": 2, "order": [],
            "device_bytes": 72057594037927937, "most_operands": 1})"}) {
    EXPECT_EQ(loaded(text), std::nullopt) << text;
    EXPECT_FALSE(std::filesystem::exists(path_)) << text;
  }
}

TEST_F(ModelNotesTest, are_not_waited_for_where_something_else_is_in_their_place) {
  const std::filesystem::path pipe = folder_.path() / "pipe.json";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(ModelNotesFile(pipe, 3).load(), std::nullopt);
  EXPECT_EQ(ModelNotesFile(folder_.path(), 3).load(), std::nullopt);
}

TEST_F(ModelNotesTest, that_cannot_be_written_are_a_warning) {
  folder_.write("models", "a file where a folder is wanted");
  const ModelNotesFile file(folder_.path() / "models" / "model.json", 3);
  testing::internal::CaptureStderr();
  file.save({.gradients_read_once = true});
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("is not kept: writing "));
  EXPECT_EQ(file.load(), std::nullopt);
}

TEST_F(ModelNotesTest, are_nowhere_where_nothing_is_kept) {
  const ModelNotesFile file(std::filesystem::path{}, 3);
  testing::internal::CaptureStderr();
  file.save({.gradients_read_once = true});
  EXPECT_EQ(file.load(), std::nullopt);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace terrace
