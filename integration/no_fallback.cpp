#include "integration/no_fallback.h"

#include <exception>
#include <string_view>

#include <c10/util/Exception.h>

namespace terrace {
namespace {

/// As all begin that an op is refused with (see ProgramMemory, ManagedStorage).
constexpr std::string_view ours = "terrace: ";

constinit thread_local c10::WarningHandler* handler_before = nullptr;

class Rethrows final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (std::current_exception() != nullptr) {
      try {
        throw;
      } catch (const c10::Error& error) {
        if (error.msg().starts_with(ours)) {
          throw;
        }
      } catch (...) {  // what it warns of is another's
      }
    }
    handler_before->process(warning);
  }
};

Rethrows& rethrows() noexcept {
  static auto& handler = *new Rethrows;  // never destroyed: threads may outlive the program's end
  return handler;
}

}  // namespace

void NoFallback::arm() noexcept {
  is_armed_ = true;
  if (c10::WarningHandler* const now = c10::WarningUtils::get_warning_handler(); now != &rethrows()) {
    handler_before = now;
    c10::WarningUtils::set_warning_handler(&rethrows());
  }
}

void NoFallback::disarm() noexcept {
  is_armed_ = false;
  // Otherwise whoever had set the one before has taken it back, or another has set his own.
  if (c10::WarningUtils::get_warning_handler() == &rethrows()) {
    c10::WarningUtils::set_warning_handler(handler_before);
  }
}

}  // namespace terrace
