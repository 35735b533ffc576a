/// Files, and limits on them, for tests of input and output.
#pragma once

#include <csignal>
#include <fcntl.h>
#include <optional>
#include <unistd.h>

#include <gtest/gtest.h>

#include "offload/io_engine.h"
#include "tests/base/temporary_folder.h"
#include "tests/offload/resource_limit.h"

namespace terrace {

/// A file in a folder of its own, both removed at the end; or an existing one such as a device.
class OpenFile {
 public:
  OpenFile() : folder_(std::in_place) { open(folder_->path() / "file", O_RDWR | O_CREAT); }
  OpenFile(const std::filesystem::path& existing, int flags) { open(existing, flags); }
  ~OpenFile() { ::close(io_file_.descriptor); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  const IoFile& get() const { return io_file_; }

 private:
  void open(const std::filesystem::path& path, int flags) {
    io_file_ = {::open(path.c_str(), flags | O_CLOEXEC, 0600), path};
    EXPECT_GE(io_file_.descriptor, 0) << path;
  }

  std::optional<TemporaryFolder> folder_;
  IoFile io_file_;
};

/// No file may grow beyond this while it lives, and exceeding it is an error instead of a signal.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : limit_(RLIMIT_FSIZE, bytes) {}

 private:
  struct IgnoredSignal {
    IgnoredSignal() = default;
    ~IgnoredSignal() { std::signal(SIGXFSZ, previous); }
    IgnoredSignal(const IgnoredSignal&) = delete;
    IgnoredSignal& operator=(const IgnoredSignal&) = delete;

    void (*const previous)(int) = std::signal(SIGXFSZ, SIG_IGN);
  };

  const IgnoredSignal ignored_;  // for longer than the limit
  const ResourceLimit limit_;
};

}  // namespace terrace
