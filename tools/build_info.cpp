#include "tools/build_info.h"

#include <sys/utsname.h>

#include <torch/headeronly/version.h>

#include "offload/loaded_cuda_driver.h"
#include "tools/version.h"

namespace terrace {
namespace {

std::string compiler() {
#ifdef __clang__
  return "Clang " __clang_version__;
#else
  return "GCC " __VERSION__;
#endif
}

std::string kernel() {
  utsname name{};
  return ::uname(&name) == 0 ? std::string(name.sysname) + " " + name.release : "";
}

}  // namespace

BuildInfo build_info() {
  return {version, TORCH_VERSION, compiler(), is_built_with_cuda(), TERRACE_LIBURING_VERSION, kernel()};
}

}  // namespace terrace
