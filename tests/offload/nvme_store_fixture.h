/// What the tests of the NVMe store build on: a folder of their own, an engine that can be made to fail, and stores of
/// a few extents.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>

#include <gtest/gtest.h>

#include "offload/choose_engine.h"
#include "offload/nvme_store.h"
#include "tests/offload/aligned_bytes.h"
#include "tests/offload/fault_injecting_engine.h"
#include "tests/offload/store_io.h"

namespace terrace {

inline constexpr std::size_t kExtent = 8192;

class NvmeStoreTest : public testing::Test {
 protected:
  NvmeStoreTest() : name_((std::filesystem::temp_directory_path() / "terrace-test-XXXXXX").string()) {
    EXPECT_NE(::mkdtemp(name_.data()), nullptr);
    folder_ = name_;
  }
  ~NvmeStoreTest() override { std::filesystem::remove_all(folder_); }

  static std::uint64_t capacity_for(std::uint64_t extents, std::size_t paths = 1) {
    return paths * extent_file_bytes(kExtent, extents / paths);
  }

  std::string name_;
  std::filesystem::path folder_;
  AlignedBytes read_back(NvmeStore& store, ExtentId extent, std::size_t size = kExtent) {
    return io_.read(store, extent, size);
  }
  void write(NvmeStore& store, ExtentId extent, std::span<const std::byte> bytes) { io_.write(store, extent, bytes); }

  FaultInjectingEngine engine_{make_io_engine("auto")};
  StoreIo io_{engine_};
};

inline AlignedBytes pattern(std::size_t size, std::uint64_t seed) { return random_bytes(size, seed); }

inline std::uint64_t number(ExtentId extent) { return static_cast<std::uint64_t>(extent); }

/// The text of the exception of that type that `action` throws.
template <typename Exception, typename Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const Exception& error) {
    return error.what();
  }
  return "nothing of that type was thrown";
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

}  // namespace terrace
