#include "integration/cuda_program.h"

#include <atomic>
#include <dlfcn.h>
#include <exception>
#include <filesystem>
#include <typeinfo>
#include <utility>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "base/error.h"
#include "integration/forwarding_cuda_allocator.h"
#include "integration/pause.h"

namespace terrace {
namespace {

constexpr c10::DeviceIndex device_index = 0;

/// The library lies beside that of LibTorch which this program uses.
std::string load_library() {
  Dl_info torch_cpu{};
  if (dladdr(reinterpret_cast<const void*>(&at::globalContext), &torch_cpu) == 0 || torch_cpu.dli_fname == nullptr) {
    return "the folder of LibTorch's libraries is not known";
  }
  const auto library = std::filesystem::path(torch_cpu.dli_fname).replace_filename("libtorch_cuda.so");
  if (dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    const char* const why = dlerror();
    return std::string("LibTorch's CUDA library cannot be loaded: ") + (why != nullptr ? why : library.c_str());
  }
  return {};
}

std::string make_available() {
  // Whether it is there is asked in this way first: LibTorch would remember that it is not.
  if (!at::CUDAHooksRegistry()->Has("CUDAHooks")) {
    if (std::string why = load_library(); !why.empty()) {
      return why;
    }
  }
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  if (typeid(hooks) == typeid(at::CUDAHooksInterface)) {
    return "LibTorch was asked for CUDA before its CUDA library was loaded; link LibTorch's CUDA library (torch_cuda) "
           "with the program, or begin the session before torch::manual_seed and what else asks";
  }
  return hooks.hasCUDA() ? "" : "LibTorch's CUDA library finds no device that it can use";
}

/// Lives until the process exits: LibTorch keeps it.
ForwardingCudaAllocator& forwarding_allocator() {
  namespace pool = c10::cuda::CUDACachingAllocator;
  static ForwardingCudaAllocator* const installed = [] {
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);  // what initializes it looks at the one that is there
    auto* const allocator = new ForwardingCudaAllocator(*pool::get(), device_index);
    pool::allocator.store(allocator);
    constexpr std::uint8_t above_all = 255;
    c10::SetAllocator(c10::DeviceType::CUDA, allocator, above_all);
    return allocator;
  }();
  return *installed;
}

}  // namespace

std::string load_cuda_program() {
  static const std::string why_not = make_available();
  return why_not;
}

void* current_cuda_stream() { return c10::cuda::getCurrentCUDAStream(device_index).stream(); }

SegmentPool& cuda_pool() { return forwarding_allocator().pool(); }

void attach_cuda_pool(PoolBudget& budget, ProgramMemory& memory) { forwarding_allocator().attach(budget, memory); }

void detach_cuda_pool() noexcept { forwarding_allocator().detach(); }

}  // namespace terrace
