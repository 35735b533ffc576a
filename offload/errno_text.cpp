#include "offload/errno_text.h"

#include <cstring>

namespace terrace {

std::string errno_text(int error_number) {
  const char* words = strerrordesc_np(error_number);
  const char* symbol = strerrorname_np(error_number);
  return std::string(words != nullptr ? words : "unknown error") + " (" +
         (symbol != nullptr ? std::string(symbol) : std::to_string(error_number)) + ")";
}

}  // namespace terrace
