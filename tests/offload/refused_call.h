/// Kernels that lack something, for tests of what we do then.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace terrace {

/// Runs `check` in a forked child, after `prepare`. True if both returned true.
template <class Prepare, class Check>
bool holds_in_child(Prepare prepare, Check check) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      ::_exit(prepare() && check() ? 0 : 1);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(1);
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// In which one system call always fails.
template <class Check>
bool holds_where_call_is_refused(int call, int error_number, Check check) {
  const auto refuse = [&] {
    const auto number = static_cast<std::uint32_t>(call);
    const auto answer = SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(error_number);
    sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, answer),
                            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog program{4, filter};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
      std::perror("seccomp");
      return false;
    }
    return true;
  };
  return holds_in_child(refuse, check);
}

/// In which so much memory can be locked; as nobody, since the limit does not hold for root.
template <class Check>
bool holds_where_locked_memory_is_limited(std::size_t bytes, Check check) {
  const auto limit_it = [&] {
    constexpr uid_t nobody = 65534;
    const rlimit limit{bytes, bytes};
    return ::setrlimit(RLIMIT_MEMLOCK, &limit) == 0 && (::geteuid() != 0 || ::setresuid(nobody, nobody, nobody) == 0);
  };
  return holds_in_child(limit_it, check);
}

}  // namespace terrace
