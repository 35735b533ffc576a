#include "tools/interrupt.h"

namespace terrace {
namespace {

volatile std::sig_atomic_t interrupted = 0;

void on_interrupt(int /*signal*/) { interrupted = 1; }

}  // namespace

Interrupt::Interrupt() {
  interrupted = 0;
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);  // reset: the second signal is not ours
  for (std::size_t i = 0; i < signals.size(); ++i) {
    sigaction(signals[i], nullptr, &previous_[i]);
    const bool is_ignored = signals[i] == SIGHUP && previous_[i].sa_handler == SIG_IGN;
    if (!is_ignored) sigaction(signals[i], &action, nullptr);
  }
}

Interrupt::~Interrupt() {
  for (std::size_t i = 0; i < signals.size(); ++i) sigaction(signals[i], &previous_[i], nullptr);
}

bool Interrupt::requested() const noexcept { return interrupted != 0; }

}  // namespace terrace
