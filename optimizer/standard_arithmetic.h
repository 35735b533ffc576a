/// Arithmetic that does not depend on what the program has told its threads.
#pragma once

#include <cfenv>

namespace terrace {

/// While it lives, this thread rounds to the nearest and keeps subnormal numbers, whatever std::fesetround or
/// at::set_flush_denormal have told it: which thread updates is not to change a bit.
class StandardArithmetic {
 public:
  StandardArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~StandardArithmetic() { std::fesetenv(&before_); }
  StandardArithmetic(const StandardArithmetic&) = delete;
  StandardArithmetic& operator=(const StandardArithmetic&) = delete;

 private:
  std::fenv_t before_{};
};

}  // namespace terrace
