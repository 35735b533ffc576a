/// Ctrl-C, as a request to end after the current step. A second one ends the process at once.
#pragma once

#include <csignal>

namespace terrace {

/// Listens for SIGINT while it lives. One at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  bool requested() const noexcept;

 private:
  struct sigaction previous_ = {};
};

}  // namespace terrace
