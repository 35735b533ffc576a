/// Ctrl-C, the SIGTERM by which machines and schedulers ask, or a terminal that goes (SIGHUP, but under nohup), as a
/// request to end after the current step. A second one of the same kind ends the process at once.
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
  static constexpr std::array signals{SIGINT, SIGTERM, SIGHUP};

  std::array<struct sigaction, signals.size()> previous_{};
};

}  // namespace terrace
