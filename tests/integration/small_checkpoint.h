/// Small checkpoints that each hold one value, in folders of their own: what the tests of checkpoint files save and
/// load.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "integration/checkpoint_reader.h"
#include "integration/checkpoint_writer.h"
#include "tests/base/temporary_folder.h"
#include "tests/base/text_of.h"

namespace terrace::testing {

/// Sizes around the pieces in which records are read, and around their alignment.
inline constexpr std::array<std::size_t, 4> sizes{4, 4096, 5000, 40000};

inline std::vector<std::byte> bytes_of(int value, std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>(static_cast<std::size_t>(value) * 31 + i * 7);
  }
  return bytes;
}

inline CheckpointRecord buffer_record(const std::string& name, std::size_t size) {
  CheckpointRecord record;
  record.name = name;
  record.kind = CheckpointRecord::Kind::buffer;
  record.dtype = "uint8";
  record.shape = {static_cast<std::int64_t>(size)};
  record.strides = {1};
  return record;
}

inline void save(CheckpointFiles& files, const std::filesystem::path& folder, int value) {
  CheckpointWriter writer(files, folder);
  for (const std::size_t size : sizes) {
    writer.begin(buffer_record("of " + std::to_string(size), size));
    const std::vector<std::byte> bytes = bytes_of(value, size);
    writer.append(std::span(bytes).first(size / 3));
    writer.append(std::span(bytes).subspan(size / 3));
  }
  writer.commit({{"value", std::to_string(value)}});
}

/// The value that was saved; all bytes are checked.
inline int load(const std::filesystem::path& folder) {
  const CheckpointReader reader(checkpoint_files(), folder);
  const int value = std::stoi(reader.manifest().notes.at("value"));
  EXPECT_EQ(reader.manifest().records.size(), sizes.size());
  for (const CheckpointRecord& record : reader.manifest().records) {
    EXPECT_EQ(record.offset % checkpoint_alignment, 0U);
    reader.verify(record);
    std::vector<std::byte> bytes(record.bytes);
    reader.read(record, [&](std::uint64_t offset) { return std::span(bytes).subspan(offset).first(1 + offset % 3); });
    EXPECT_EQ(bytes, bytes_of(value, record.bytes));
  }
  return value;
}

/// Nothing where there is no checkpoint.
inline std::optional<int> load_if_any(const std::filesystem::path& folder) {
  try {
    return load(folder);
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("there is none"));
    return std::nullopt;
  }
}

inline std::set<std::string> names_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

inline std::filesystem::path data_file_in(const std::filesystem::path& folder) {
  for (const std::string& name : names_in(folder)) {
    if (is_data_file_name(name)) return folder / name;
  }
  ADD_FAILURE() << "no data file in " << folder;
  return {};
}

inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

class CheckpointTest : public ::testing::Test {
 protected:
  std::filesystem::path new_folder() { return scratch_.path() / ("checkpoint" + std::to_string(folders_++)); }

  void expect_a_save_works(const std::filesystem::path& folder) {
    save(*system_, folder, 3);
    EXPECT_EQ(load(folder), 3);
    EXPECT_EQ(names_in(folder),
              (std::set<std::string>{"lock", "manifest.json", data_file_in(folder).filename().string()}));
  }

  TemporaryFolder scratch_;
  std::unique_ptr<CheckpointFiles> system_ = make_system_files();
  int folders_ = 0;
};

}  // namespace terrace::testing
