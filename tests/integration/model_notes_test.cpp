// What was learned of a model is kept from run to run, and a file that does not hold such is not believed.

#include "integration/model_notes.h"

#include <filesystem>
#include <string>
#include <sys/stat.h>

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
    const std::optional<ModelNotes> notes = ModelNotesFile(path_).load();
    logged_ = testing::internal::GetCapturedStderr();
    return notes;
  }

  TemporaryFolder folder_;
  std::filesystem::path path_;
  std::string logged_;
};

TEST_F(ModelNotesTest, give_back_what_was_saved_last) {
  const ModelNotesFile file(folder_.path() / "terrace" / "models" / "model.json");
  EXPECT_EQ(file.load(), std::nullopt);
  testing::internal::CaptureStderr();
  file.save({.gradients_read_once = true});
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("the next run places this model by"));
  EXPECT_EQ(file.load(), ModelNotes{.gradients_read_once = true});
  file.save({.gradients_read_once = false});
  EXPECT_EQ(file.load(), ModelNotes{.gradients_read_once = false});
}

TEST_F(ModelNotesTest, are_removed_with_a_line_where_they_are_none) {
  EXPECT_EQ(loaded(R"({"version": 1, "gradients_read_once": true})"), ModelNotes{.gradients_read_once = true});
  EXPECT_EQ(logged_, "");
  for (const std::string& text : {std::string(), std::string("{"), std::string("[]"), std::string(R"({"version": 1})"),
                                  std::string(R"({"version": 1, "gradients_read_once": 1})"),
                                  std::string(R"({"version": 2, "gradients_read_once": true})"),
                                  R"({"version": 1, "gradients_read_once": true})" + std::string(5000, ' '),
                                  R"({"version": )" + std::string(1 << 20, '[')}) {
    EXPECT_EQ(loaded(text), std::nullopt) << text.substr(0, 80);
    EXPECT_THAT(logged_, HasSubstr("is of no use")) << text.substr(0, 80);
    EXPECT_FALSE(std::filesystem::exists(path_)) << text.substr(0, 80);
  }
}

TEST_F(ModelNotesTest, are_not_waited_for_where_something_else_is_in_their_place) {
  const std::filesystem::path pipe = folder_.path() / "pipe.json";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(ModelNotesFile(pipe).load(), std::nullopt);
  EXPECT_EQ(ModelNotesFile(folder_.path()).load(), std::nullopt);
}

TEST_F(ModelNotesTest, that_cannot_be_written_are_a_warning) {
  folder_.write("models", "a file where a folder is wanted");
  const ModelNotesFile file(folder_.path() / "models" / "model.json");
  testing::internal::CaptureStderr();
  file.save({.gradients_read_once = true});
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("is not kept: writing "));
  EXPECT_EQ(file.load(), std::nullopt);
}

TEST_F(ModelNotesTest, are_nowhere_where_nothing_is_kept) {
  const ModelNotesFile file(std::filesystem::path{});
  testing::internal::CaptureStderr();
  file.save({.gradients_read_once = true});
  EXPECT_EQ(file.load(), std::nullopt);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace terrace
