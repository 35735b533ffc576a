/// Ctrl-C, or the SIGTERM by which machines and schedulers ask, as a request to end after the current step. A second
/// one ends the process at once.
#pragma once

#include <array>
#include <csignal>

namespace terrace {

/// Listens for them while it lives. One at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  bool requested() const noexcept;

 private:
  static constexpr std::array signals{SIGINT, SIGTERM};

  std::array<struct sigaction, signals.size()> previous_{};
};

}  // namespace terrace
