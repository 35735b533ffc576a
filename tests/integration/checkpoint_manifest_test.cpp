// A manifest says again what it was made of, and one that no save can have written is refused, whatever it says.

#include "integration/checkpoint_manifest.h"

#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "integration/checkpoint_checksum.h"

namespace terrace::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Kind = CheckpointRecord::Kind;

CheckpointRecord record(Kind kind, const std::string& dtype, std::uint64_t offset, std::uint64_t bytes) {
  CheckpointRecord made;
  made.name = "weight";
  made.kind = kind;
  made.dtype = dtype;
  made.shape = {3, 4};
  made.strides = {4, 1};
  made.offset = offset;
  made.bytes = bytes;
  made.checksum = 0xfedcba9876543210 + offset;
  return made;
}

/// A parameter that was updated, with its states.
CheckpointManifest sample() {
  CheckpointManifest manifest;
  manifest.data_file = "data.0123456789abcdef";
  manifest.records = {record(Kind::parameter, "bfloat16", 0, 24), record(Kind::master, "float32", 4096, 48),
                      record(Kind::momentum, "float32", 8192, 48), record(Kind::variance, "float32", 12288, 48)};
  manifest.records[0].updates = 7;
  manifest.records[0].updated_by = "AdamW";
  manifest.records[0].aliases = {"head.weight"};
  manifest.data_bytes = 12288 + 48;
  manifest.notes = {{"step", "7"}, {"text", "with \"quotes\",\nlines and ümlauts"}};
  return manifest;
}

/// The text with one part in another's place, and a checksum that is right again.
std::string changed(const std::string& from, const std::string& to) {
  std::string text = to_text(sample());
  const std::size_t at = text.find(from);
  if (at == std::string::npos) {
    ADD_FAILURE() << "there is no " << from << " in " << text;
    return text;
  }
  text.replace(at, from.size(), to);
  const std::size_t body = text.find('\n') + 1;
  const std::string checksum = to_hex(checksum_of(std::string_view(text).substr(body)));
  return text.replace(text.find(": \"") + 3, checksum.size(), checksum);
}

std::string refusal_of(const std::string& text) {
  try {
    parse_manifest(text, "the/manifest.json");
  } catch (const CorruptData& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "threw another error: " << error.what();
    return "";
  }
  ADD_FAILURE() << "accepted " << text;
  return "";
}

TEST(CheckpointManifest, says_again_what_it_was_made_of) {
  const CheckpointManifest made = sample();
  const CheckpointManifest read = parse_manifest(to_text(made), "manifest.json");
  EXPECT_EQ(read.data_file, made.data_file);
  EXPECT_EQ(read.data_bytes, made.data_bytes);
  EXPECT_EQ(read.notes, made.notes);
  ASSERT_EQ(read.records.size(), made.records.size());
  for (std::size_t i = 0; i < made.records.size(); ++i) {
    const CheckpointRecord& one = made.records[i];
    const CheckpointRecord& other = read.records[i];
    EXPECT_EQ(other.name, one.name);
    EXPECT_EQ(other.kind, one.kind);
    EXPECT_EQ(other.dtype, one.dtype);
    EXPECT_EQ(other.shape, one.shape);
    EXPECT_EQ(other.strides, one.strides);
    EXPECT_EQ(other.offset, one.offset);
    EXPECT_EQ(other.bytes, one.bytes);
    EXPECT_EQ(other.checksum, one.checksum);
    EXPECT_EQ(other.updates, one.updates);
    EXPECT_EQ(other.updated_by, one.updated_by);
    EXPECT_EQ(other.aliases, one.aliases);
  }
  EXPECT_TRUE(looks_like_a_manifest(to_text(made)));
}

TEST(CheckpointManifest, another_version_is_told_as_such) {
  try {
    parse_manifest(changed("\"version\": 3", "\"version\": 4"), "the/manifest.json");
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("the/manifest.json has version 4"), HasSubstr("hint: ")));
  }
}

TEST(CheckpointManifest, of_the_version_before_names_no_optimizer_and_is_of_adamw) {
  std::string text = to_text(sample());
  const CheckpointManifest now = parse_manifest(text, "manifest.json");
  const CheckpointManifest before = parse_manifest(changed("   \"optimizer\": \"AdamW\",\n", ""), "manifest.json");
  ASSERT_EQ(before.records.size(), now.records.size());
  EXPECT_EQ(before.records[0].updated_by, "AdamW");
}

TEST(CheckpointManifest, notes_and_names_are_utf8) {
  CheckpointManifest manifest = sample();
  manifest.notes["bytes"] = "\xff";
  EXPECT_THROW(to_text(manifest), ConfigError);
}

TEST(CheckpointManifest, notes_are_refused_that_no_manifest_can_hold) {
  require_notes(sample().notes);
  EXPECT_THROW(require_notes({{"bytes", "\xff"}}), ConfigError);
  EXPECT_THROW(require_notes({{"\xff", ""}}), ConfigError);
  EXPECT_THROW(require_notes({{"large", std::string(checkpoint_notes_most_bytes, 'x')}}), ConfigError);
}

TEST(CheckpointManifest, a_wrong_checksum_is_told_as_such) {
  std::string text = to_text(sample());
  text[text.size() / 2] = static_cast<char>(text[text.size() / 2] ^ 1);
  EXPECT_THAT(refusal_of(text), HasSubstr("the/manifest.json is corrupt: its checksum is wrong"));
}

TEST(CheckpointManifest, numbers_that_no_save_writes_are_refused) {
  const auto expect_refused = [](const std::string& from, const std::string& to, const std::string& why) {
    EXPECT_THAT(refusal_of(changed(from, to)), HasSubstr(why)) << from << " to " << to;
  };
  // Offsets beyond the file, overlapping, negative, unaligned.
  expect_refused("\"offset\": 12288", "\"offset\": 1228800", "does not follow");
  expect_refused("\"offset\": 8192", "\"offset\": 4096", "does not follow");
  expect_refused("\"offset\": 8192", "\"offset\": 8193", "does not follow");
  expect_refused("\"offset\": 8192", "\"offset\": -8192", "\"offset\" is not a whole number");
  expect_refused("\"offset\": 8192", "\"offset\": 18446744073709547520", "does not follow");
  expect_refused("\"offset\": 8192", "\"offset\": 1e300", "\"offset\" is not a whole number");
  expect_refused("\"bytes\": 12336", "\"bytes\": 12335", "does not follow");
  expect_refused("\"bytes\": 12336", "\"bytes\": 12337", "not as large as its data file");
  expect_refused("\"bytes\": 12336", "\"bytes\": 18446744073709551615", "larger than any file");
  // Sizes.
  expect_refused("\"bytes\": 24", "\"bytes\": 48", "not as large as its type and shape say");
  expect_refused("   3,\n    4", "   3,\n    5", "not as large as its type and shape say");
  expect_refused("   3,\n    4", "   9223372036854775807,\n    9223372036854775807", "a shape beyond all memory");
  expect_refused("   3,\n    4", "   -3,\n    -4", "\"shape\" is not a whole number");
  expect_refused("   3,\n    4", "   18446744073709551615,\n    4", "\"shape\" is not a whole number in range");
  expect_refused("   3,\n    4", "   3.5,\n    4", "\"shape\" is not a whole number");
  expect_refused("   3,\n    4", "   12", "more or fewer strides");
  expect_refused("\"updates\": 7", "\"updates\": -7", "\"updates\" is not a whole number");
}

TEST(CheckpointManifest, records_that_no_save_writes_are_refused) {
  const auto expect_refused = [](const std::string& from, const std::string& to, const std::string& why) {
    EXPECT_THAT(refusal_of(changed(from, to)), HasSubstr(why)) << from << " to " << to;
  };
  expect_refused("\"kind\": \"momentum\"", "\"kind\": \"master\"", "master of 'weight' comes twice");
  expect_refused("\"kind\": \"momentum\"", "\"kind\": \"buffer\"", "momentum of 'weight' is missing");
  expect_refused("\"kind\": \"momentum\"", "\"kind\": \"velocity\"", "unknown kind");
  expect_refused("\"updates\": 7", "\"updates\": 0", "is of no parameter that has one");
  expect_refused("\"optimizer\": \"AdamW\"", "\"optimizer\": \"SGD\"",
                 "variance of 'weight' is of no parameter that has one");
  expect_refused("\"optimizer\": \"AdamW\"", "\"optimizer\": \"Adagrad\"",
                 "'weight' was updated by an unknown optimizer");
  expect_refused("\"dtype\": \"bfloat16\"", "\"dtype\": \"bfloat17\"", "unknown type");
  expect_refused("\"dtype\": \"float32\"", "\"dtype\": \"int32\"", "does not go with its parameter");
  expect_refused("\"name\": \"weight\"", "\"name\": \"other\"", "master of 'other' is missing");
  expect_refused("fedcba9876543210", "fedcba987654321", "has no checksum");
  expect_refused("fedcba9876543210", "FEDCBA9876543210", "has no checksum");
  expect_refused("data.0123456789abcdef", "../../etc/passwd", "it names no data file");
  expect_refused("terrace checkpoint", "another format", "it is of another format");
}

TEST(CheckpointManifest, values_of_other_json_types_are_refused) {
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"format\": \"terrace checkpoint\"", "\"format\": 1"},
           {"\"version\": 3", "\"version\": \"3\""},
           {"\"data\": \"data.0123456789abcdef\"", "\"data\": {}"},
           {"\"name\": \"weight\"", "\"name\": 5"},
           {"\"kind\": \"master\"", "\"kind\": null"},
           {"\"shape\": [", "\"shape\": 5, \"more\": ["},
           {"\"shape\": [", "\"more\": ["},
           {"\"records\": [", "\"records\": 7, \"more\": ["},
           {"\"step\": \"7\"", "\"step\": 7"},
           {"\"aliases\": [", "\"aliases\": 1, \"more\": ["},
           {"\"xxh3\": \"", "\"xxh3\": 1, \"more\": \""},
           {"\"updates\": 7", "\"updates\": []"},
           {"\"optimizer\": \"AdamW\"", "\"optimizer\": 1"},
           {"\"notes\": {", "\"notes\": {{"},
       }) {
    EXPECT_THAT(refusal_of(changed(from, to)), HasSubstr("the/manifest.json is corrupt: ")) << from;
  }
}

}  // namespace
}  // namespace terrace::testing
