// No byte of a checkpoint is believed that is not what was saved.

#include <cstdint>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/fault_injecting_files.h"
#include "tests/integration/message_of.h"
#include "tests/integration/small_checkpoint.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;

using CheckpointBytes = CheckpointTest;

TEST_F(CheckpointBytes, an_empty_record_is_one_wherever_it_comes) {
  const auto folder = new_folder();
  {
    CheckpointWriter writer(*system_, folder);
    writer.begin(buffer_record("first", 0));
    writer.begin(buffer_record("of 4", 4));
    writer.append(bytes_of(1, 4));
    writer.begin(buffer_record("last", 0));
    writer.commit({});
  }
  const CheckpointReader reader(*system_, folder);
  ASSERT_EQ(reader.manifest().records.size(), 3U);
  for (const CheckpointRecord& record : reader.manifest().records) reader.verify(record);
}

TEST_F(CheckpointBytes, a_record_without_a_place_is_refused) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const CheckpointReader reader(*system_, folder);
  const CheckpointRecord& record = reader.manifest().records.front();
  EXPECT_THAT(
      message_of<LogicError>([&] { reader.read(record, [](std::uint64_t) { return std::span<std::byte>(); }); }),
      HasSubstr("no place for the bytes from 0 of the buffer of 'of 4'"));
}

TEST_F(CheckpointBytes, a_manifest_larger_than_any_is_corrupt_and_not_read) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  std::filesystem::resize_file(folder / "manifest.json", std::uintmax_t{1} << 40);
  FaultInjectingFiles files;
  EXPECT_THAT(message_of<CorruptData>([&] { CheckpointReader(files, folder); }), HasSubstr("more than any manifest"));
  EXPECT_EQ(files.reads(), 0U);
  save(*system_, folder, 2);
  EXPECT_EQ(load(folder), 2);
}

TEST_F(CheckpointBytes, a_save_meanwhile_changes_nothing_of_what_is_read) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const CheckpointReader reader(*system_, folder);
  save(*system_, folder, 2);
  for (const CheckpointRecord& record : reader.manifest().records) reader.verify(record);
  EXPECT_EQ(reader.manifest().notes.at("value"), "1");
}

TEST_F(CheckpointBytes, every_flipped_bit_of_a_manifest_is_found) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const std::string text = text_of(folder / "manifest.json");
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string changed = text;
    changed[i] = static_cast<char>(changed[i] ^ (1 << (i % 8)));
    write_text(folder / "manifest.json", changed);
    EXPECT_THAT(message_of<CorruptData>([&] { load(folder); }), HasSubstr("manifest.json is corrupt")) << "byte " << i;
  }
  expect_a_save_works(folder);
}

TEST_F(CheckpointBytes, a_manifest_cut_anywhere_is_corrupt) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const std::string text = text_of(folder / "manifest.json");
  for (std::size_t size = 0; size < text.size(); size += 7) {
    write_text(folder / "manifest.json", text.substr(0, size));
    EXPECT_THAT(message_of<CorruptData>([&] { load(folder); }), HasSubstr("manifest.json is corrupt")) << size;
  }
}

TEST_F(CheckpointBytes, a_flipped_bit_of_any_record_is_found_and_the_record_named) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const std::string data = text_of(data_file_in(folder));
  const CheckpointManifest manifest = CheckpointReader(*system_, folder).manifest();
  for (const CheckpointRecord& record : manifest.records) {
    for (const std::uint64_t at : {record.offset, record.offset + record.bytes - 1}) {
      std::string changed = data;
      changed[at] = static_cast<char>(changed[at] ^ 1);
      write_text(data_file_in(folder), changed);
      const std::string message = message_of<CorruptData>([&] { load(folder); });
      EXPECT_THAT(message, HasSubstr(describe(record)));
      EXPECT_THAT(message, HasSubstr(data_file_in(folder).string()));
    }
  }
}

TEST_F(CheckpointBytes, missing_and_truncated_data_are_told_as_such) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  const auto data = data_file_in(folder);
  const CheckpointReader reader(*system_, folder);
  std::filesystem::resize_file(data, std::filesystem::file_size(data) - 1);
  EXPECT_THAT(message_of<CorruptData>([&] { load(folder); }), HasSubstr("truncated: it has"));
  EXPECT_THAT(message_of<CorruptData>([&] { reader.verify(reader.manifest().records.back()); }),
              HasSubstr("truncated: it ends within the buffer of 'of 40000'"));
  std::filesystem::remove(data);
  EXPECT_THAT(message_of<CorruptData>([&] { load(folder); }), HasSubstr(data.string() + " is missing"));
}

TEST_F(CheckpointBytes, a_read_that_fails_is_an_io_error) {
  const auto folder = new_folder();
  save(*system_, folder, 1);
  FaultInjectingFiles files(FileFault::error, 2, /*reads_only=*/true);
  const CheckpointReader reader(files, folder);
  EXPECT_THROW(
      {
        for (const CheckpointRecord& record : reader.manifest().records) reader.verify(record);
      },
      IoError);
}

}  // namespace
}  // namespace terrace::testing
