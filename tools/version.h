/// The version of Terrace, that of CMakeLists.txt.
#pragma once

namespace terrace {

inline constexpr const char* version = "0.1.0";

}  // namespace terrace
