/// Files that do wrong on purpose, for the tests of checkpoints.
#pragma once

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "integration/checkpoint_files.h"
#include "offload/errno_text.h"

namespace terrace::testing {

enum class FileFault : std::uint8_t {
  none,
  error,       // nothing happens but for half of a write, and it fails
  late_error,  // it happens, and is said to have failed
  kill,        // half of a write happens, and the process is gone
};

/// Passes operations on to the system's files, but for the `nth`, from 0, of all or of the reads.
class FaultInjectingFiles final : public CheckpointFiles {
  template <class Operation, class Half = void (*)()>
  auto run(
      Operation&& operation, Half&& half = [] {}, bool is_read = false) {
    const std::uint64_t number = reads_only_ ? reads_ - 1 : operations_;
    ++operations_;
    if (fault_ == FileFault::none || fired_ || number != nth_ || (reads_only_ && !is_read)) {
      return operation();
    }
    fired_ = true;
    if (fault_ == FileFault::late_error) {
      operation();
    } else {
      half();
    }
    if (fault_ == FileFault::kill) {
      ::raise(SIGKILL);
    }
    throw IoError("injected: operation " + std::to_string(number) + " failed: " + errno_text(ENOSPC));
  }

 public:
  explicit FaultInjectingFiles(FileFault fault = FileFault::none, std::uint64_t nth = 0, bool reads_only = false)
      : fault_(fault), nth_(nth), reads_only_(reads_only) {}

  std::uint64_t operations() const noexcept { return operations_; }
  std::uint64_t reads() const noexcept { return reads_; }
  bool fired() const noexcept { return fired_; }
  /// What makes a save last, in its order: "sync data.0123456789abcdef", "rename manifest.json" and so on.
  const std::vector<std::string>& order() const noexcept { return order_; }

  void make_folder(const std::filesystem::path& folder) override {
    run([&] { system_->make_folder(folder); });
  }
  std::optional<std::vector<std::string>> list(const std::filesystem::path& folder) override {
    return run([&] { return system_->list(folder); });
  }
  std::optional<CheckpointFile> lock(const std::filesystem::path& path) override {
    return run([&] { return system_->lock(path); });
  }
  CheckpointFile create(const std::filesystem::path& path) override {
    return run([&] { return system_->create(path); });
  }
  std::optional<CheckpointFile> open(const std::filesystem::path& path) override {
    return run([&] { return system_->open(path); });
  }
  bool is_in_place(const CheckpointFile& file) override {
    return run([&] { return system_->is_in_place(file); });
  }
  std::uint64_t size(const CheckpointFile& file) override {
    return run([&] { return system_->size(file); });
  }
  void write(const CheckpointFile& file, std::uint64_t offset, std::span<const std::byte> bytes) override {
    run([&] { system_->write(file, offset, bytes); },
        [&] { system_->write(file, offset, bytes.first(bytes.size() / 2)); });
  }
  std::size_t read(const CheckpointFile& file, std::uint64_t offset, std::span<std::byte> bytes) override {
    ++reads_;
    return run([&] { return system_->read(file, offset, bytes); }, [] {}, true);
  }
  void resize(const CheckpointFile& file, std::uint64_t bytes) override {
    run([&] { system_->resize(file, bytes); });
  }
  void sync(const CheckpointFile& file) override {
    order_.push_back("sync " + file.path().filename().string());
    run([&] { system_->sync(file); });
  }
  void sync_folder(const std::filesystem::path& folder) override {
    order_.push_back("sync folder");
    run([&] { system_->sync_folder(folder); });
  }
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override {
    order_.push_back("rename " + to.filename().string());
    run([&] { system_->rename(from, to); });
  }
  void remove(const std::filesystem::path& path) override {
    order_.push_back("remove " + path.filename().string());
    run([&] { system_->remove(path); });
  }

 private:
  const std::unique_ptr<CheckpointFiles> system_ = make_system_files();
  const FileFault fault_;
  const std::uint64_t nth_;
  const bool reads_only_;
  std::uint64_t operations_ = 0;
  std::uint64_t reads_ = 0;
  bool fired_ = false;
  std::vector<std::string> order_;
};

}  // namespace terrace::testing
