#pragma once

#include <string>

namespace terrace {

/// The words and the symbol of an errno value: "No space left on device (ENOSPC)".
/// Thread-safe; an unknown value gives "unknown error (12345)".
std::string errno_text(int error_number);

}  // namespace terrace
