/// A disk that is soon full: a tmpfs of its own.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <optional>
#include <sched.h>
#include <string>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

namespace terrace {

/// Whether `check` returns true in a process of its own where `folder` has room for so many bytes. Nothing where this
/// system gives nobody a mount of his own.
inline std::optional<bool> holds_on_small_disk(const std::filesystem::path& folder, std::uint64_t bytes,
                                               const std::function<bool()>& check) {
  constexpr int no_mount = 77;
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string size = "size=" + std::to_string(bytes);
    const bool apart = ::unshare(CLONE_NEWNS) == 0 || ::unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0;
    if (!apart || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", folder.c_str(), "tmpfs", 0, size.c_str()) != 0) {
      ::_exit(no_mount);
    }
    int result = 2;
    try {
      result = check() ? 0 : 1;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    std::fflush(stdout);
    ::_exit(result);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == no_mount) return std::nullopt;
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace terrace
