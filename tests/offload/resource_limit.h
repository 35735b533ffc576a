/// What a process may have of something, for tests of what we do when there is no more.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <sys/resource.h>

#include <gtest/gtest.h>

namespace terrace {

/// What a field of proc_pid_status(5) says that the process has, as "VmSize", which RLIMIT_AS bounds, or "VmData",
/// which RLIMIT_DATA does.
inline std::uint64_t bytes_in_status(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::stoull(line.substr(field.size() + 1)) * 1024;
  }
  ADD_FAILURE() << "no " << field << " in /proc/self/status";
  return 0;
}

/// The process may have so much of `resource` (one of getrlimit(2)) while it lives, and what it could before
/// afterwards.
class ResourceLimit {
 public:
  ResourceLimit(__rlimit_resource_t resource, rlim_t most) : resource_(resource) {
    ::getrlimit(resource_, &before_);
    rlimit limit = before_;
    limit.rlim_cur = most;
    EXPECT_EQ(::setrlimit(resource_, &limit), 0);
  }
  ~ResourceLimit() { ::setrlimit(resource_, &before_); }
  ResourceLimit(const ResourceLimit&) = delete;
  ResourceLimit& operator=(const ResourceLimit&) = delete;

 private:
  const __rlimit_resource_t resource_;
  rlimit before_{};
};

}  // namespace terrace
