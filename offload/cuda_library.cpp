#include "offload/cuda_library.h"

#include <dlfcn.h>
#include <type_traits>

#define TERRACE_TEXT_OF(name) #name
#define TERRACE_EXPANDED_TEXT_OF(name) TERRACE_TEXT_OF(name)

namespace terrace {

std::string CudaLibrary::load() {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = ::dlerror();
    return "there is no CUDA driver: " + std::string(reason == nullptr ? "libcuda.so.1 does not load" : reason);
  }
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    if (function == nullptr && missing.empty()) {
      missing = "the CUDA driver is too old: it has no " + std::string(name);
    }
  };
#define TERRACE_FIND(name) find(name, TERRACE_EXPANDED_TEXT_OF(name));
  TERRACE_CUDA_FUNCTIONS(TERRACE_FIND)
#undef TERRACE_FIND
  return missing;
}

std::string CudaLibrary::name_of(CUresult error) const {
  const char* name = nullptr;
  return cuGetErrorName(error, &name) == CUDA_SUCCESS ? name : "CUDA error " + std::to_string(static_cast<int>(error));
}

std::string CudaLibrary::text_of(CUresult error) const {
  const char* text = nullptr;
  return cuGetErrorString(error, &text) == CUDA_SUCCESS ? text : "unknown error";
}

}  // namespace terrace
