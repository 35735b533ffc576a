# Finds CUDA's headers: CudaHeaders_INCLUDE_DIRS. No compiler of CUDA's, and nothing to link.
#
# They are those of a toolkit (CUDAToolkit_ROOT, CUDA_HOME, /usr/local/cuda), or those that come with LibTorch's wheel
# and, for what is not among them, CudaHeaders_FALLBACK. Of several the first whose version fits is taken.

foreach(dir ${CUDAToolkit_ROOT}/include $ENV{CUDAToolkit_ROOT}/include $ENV{CUDA_HOME}/include /usr/local/cuda/include
            ${LibTorch_INCLUDE_DIR}/../../nvidia/cu13/include)
  if(NOT CudaHeaders_INCLUDE_DIRS AND EXISTS ${dir}/cuda.h)
    file(STRINGS ${dir}/cuda.h CudaHeaders_version_line REGEX "#define CUDA_VERSION [0-9]+")
    string(REGEX REPLACE "[^0-9]" "" CudaHeaders_number "${CudaHeaders_version_line}")
    math(EXPR CudaHeaders_major "${CudaHeaders_number} / 1000")
    math(EXPR CudaHeaders_minor "${CudaHeaders_number} % 1000 / 10")
    if(CudaHeaders_major EQUAL CudaHeaders_FIND_VERSION_MAJOR)
      set(CudaHeaders_VERSION ${CudaHeaders_major}.${CudaHeaders_minor})
      get_filename_component(CudaHeaders_INCLUDE_DIRS ${dir} ABSOLUTE)
    endif()
  endif()
endforeach()

# crt/host_defines.h is the compiler's, which LibTorch's wheel comes without; nvml.h is not in every toolkit.
foreach(header crt/host_defines.h nvml.h)
  string(MAKE_C_IDENTIFIER CudaHeaders_has_${header} CudaHeaders_has)
  foreach(dir ${CudaHeaders_INCLUDE_DIRS} ${CudaHeaders_FALLBACK})
    if(NOT ${CudaHeaders_has} AND EXISTS ${dir}/${header})
      set(${CudaHeaders_has} ON)
      list(APPEND CudaHeaders_INCLUDE_DIRS ${dir})
    endif()
  endforeach()
endforeach()
list(REMOVE_DUPLICATES CudaHeaders_INCLUDE_DIRS)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  CudaHeaders
  REQUIRED_VARS CudaHeaders_INCLUDE_DIRS CudaHeaders_has_crt_host_defines_h CudaHeaders_has_nvml_h
  VERSION_VAR CudaHeaders_VERSION
  HANDLE_VERSION_RANGE
  REASON_FAILURE_MESSAGE
    "Run tools/setup, which puts them into .deps. Or set CUDAToolkit_ROOT to a CUDA toolkit of LibTorch's version.")
