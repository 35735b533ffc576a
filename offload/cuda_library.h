/// The functions of CUDA's driver that Terrace calls, as they are found at run time. Includes CUDA's header: only
/// loaded_cuda_driver.cpp includes this.
#pragma once

#include <cuda.h>
#include <string>

namespace terrace {

// The header's macros add what the current one of each is called in the library.
#define TERRACE_CUDA_FUNCTIONS(each)                                                                                   \
  each(cuInit) each(cuGetErrorName) each(cuGetErrorString) each(cuDeviceGetCount) each(cuDeviceGet)                    \
      each(cuDeviceGetName) each(cuDeviceGetPCIBusId) each(cuDeviceGetAttribute) each(cuDevicePrimaryCtxRetain)        \
          each(cuDevicePrimaryCtxRelease) each(cuCtxGetCurrent) each(cuCtxPushCurrent) each(cuCtxPopCurrent)           \
              each(cuMemGetInfo) each(cuStreamCreate) each(cuStreamDestroy) each(cuStreamSynchronize)                  \
                  each(cuStreamWaitEvent) each(cuEventCreate) each(cuEventDestroy) each(cuEventRecord)                 \
                      each(cuEventQuery) each(cuEventSynchronize) each(cuMemcpyHtoDAsync) each(cuMemcpyDtoHAsync)      \
                          each(cuMemsetD8Async) each(cuMemHostRegister) each(cuMemHostUnregister)                      \
                              each(cuMemGetAllocationGranularity) each(cuMemCreate) each(cuMemRelease)                 \
                                  each(cuMemAddressReserve) each(cuMemAddressFree) each(cuMemMap) each(cuMemSetAccess) \
                                      each(cuMemUnmap)

struct CudaLibrary {
#define TERRACE_MEMBER(name) decltype(&::name) name = nullptr;
  TERRACE_CUDA_FUNCTIONS(TERRACE_MEMBER)
#undef TERRACE_MEMBER

  /// Finds all of them in libcuda.so.1, which stays loaded. What could not be had; empty if all was.
  std::string load();

  std::string name_of(CUresult error) const;
  std::string text_of(CUresult error) const;
};

}  // namespace terrace
