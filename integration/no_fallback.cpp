#include "integration/no_fallback.h"

#include <exception>

#include <c10/util/Exception.h>

namespace terrace {
namespace {

constinit thread_local c10::WarningHandler* handler_before = nullptr;

class Rethrows final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (std::current_exception() != nullptr) {
      throw;
    }
    handler_before->process(warning);
  }
};

}  // namespace

void NoFallback::arm() noexcept {
  static auto& rethrows = *new Rethrows;  // never destroyed: threads may outlive the program's end
  handler_before = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(&rethrows);
  is_armed_ = true;
}

void NoFallback::disarm() noexcept {
  c10::WarningUtils::set_warning_handler(handler_before);
  is_armed_ = false;
}

}  // namespace terrace
