# Finds LibTorch: terrace::libtorch, and where it was built for CUDA terrace::c10_cuda, its small library of the CUDA
# device's allocator and streams, with the CUDA runtime that this one needs.
#
# Looks in CMAKE_PREFIX_PATH (the folder `torch` of a wheel, or an unpacked LibTorch), then in LibTorch_FALLBACK. Where
# there is none, LibTorch_ADVICE says what else than setting that path gives one.
# Of terrace::libtorch only c10 and torch_cpu are linked. This is not find_package(Torch): with a LibTorch that was built
# for CUDA that one demands the CUDA toolkit, which nothing here needs. The large libraries of CUDA are loaded at run time.

# Not in system folders: a distribution's LibTorch is another version.
find_path(LibTorch_INCLUDE_DIR torch/csrc/api/include/torch/torch.h PATHS ${LibTorch_FALLBACK}/include
          NO_SYSTEM_ENVIRONMENT_PATH NO_CMAKE_SYSTEM_PATH)
find_library(LibTorch_LIBRARY torch_cpu PATHS ${LibTorch_INCLUDE_DIR}/../lib NO_DEFAULT_PATH)
find_library(LibTorch_C10_LIBRARY c10 PATHS ${LibTorch_INCLUDE_DIR}/../lib NO_DEFAULT_PATH)
find_library(LibTorch_C10_CUDA_LIBRARY c10_cuda PATHS ${LibTorch_INCLUDE_DIR}/../lib NO_DEFAULT_PATH)
# In a wheel it is a wheel of its own; in an unpacked LibTorch its name has a digest.
file(GLOB LibTorch_cudarts ${LibTorch_INCLUDE_DIR}/../../nvidia/*/lib/libcudart.so.*
     ${LibTorch_INCLUDE_DIR}/../lib/libcudart*.so*)
list(POP_FRONT LibTorch_cudarts LibTorch_found_cudart)
set(LibTorch_CUDART_LIBRARY ${LibTorch_found_cudart} CACHE FILEPATH "The CUDA runtime that LibTorch was built with")
mark_as_advanced(LibTorch_INCLUDE_DIR LibTorch_LIBRARY LibTorch_C10_LIBRARY LibTorch_C10_CUDA_LIBRARY
                 LibTorch_CUDART_LIBRARY)

# The first of these is where 2.11 keeps its version, the second where older releases did.
foreach(header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
  if(NOT LibTorch_VERSION AND EXISTS ${LibTorch_INCLUDE_DIR}/${header})
    file(READ ${LibTorch_INCLUDE_DIR}/${header} LibTorch_version_text)
    if(LibTorch_version_text MATCHES "TORCH_VERSION[ \\\n]+\"([0-9.]+)")
      set(LibTorch_VERSION ${CMAKE_MATCH_1})
    endif()
  endif()
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch
  REQUIRED_VARS LibTorch_LIBRARY LibTorch_C10_LIBRARY LibTorch_INCLUDE_DIR
  VERSION_VAR LibTorch_VERSION
  HANDLE_VERSION_RANGE
  REASON_FAILURE_MESSAGE
    "${LibTorch_ADVICE}Set CMAKE_PREFIX_PATH to a LibTorch 2.11 of your own (a wheel's folder `torch`). Then configure\
 again with --fresh.")

if(LibTorch_FOUND AND NOT TARGET terrace::libtorch)
  add_library(terrace::c10 SHARED IMPORTED)
  set_target_properties(terrace::c10 PROPERTIES IMPORTED_LOCATION ${LibTorch_C10_LIBRARY})
  add_library(terrace::libtorch SHARED IMPORTED)
  set_target_properties(
    terrace::libtorch
    PROPERTIES IMPORTED_LOCATION ${LibTorch_LIBRARY}
               INTERFACE_LINK_LIBRARIES terrace::c10
               INTERFACE_INCLUDE_DIRECTORIES
               "${LibTorch_INCLUDE_DIR};${LibTorch_INCLUDE_DIR}/torch/csrc/api/include"
               # LibTorch's release libraries lack members that its headers declare without NDEBUG.
               INTERFACE_COMPILE_DEFINITIONS "NDEBUG;_GLIBCXX_USE_CXX11_ABI=1")
  if(LibTorch_C10_CUDA_LIBRARY AND LibTorch_CUDART_LIBRARY)
    add_library(terrace::cudart SHARED IMPORTED)
    set_target_properties(terrace::cudart PROPERTIES IMPORTED_LOCATION ${LibTorch_CUDART_LIBRARY})
    add_library(terrace::c10_cuda SHARED IMPORTED)
    set_target_properties(terrace::c10_cuda PROPERTIES IMPORTED_LOCATION ${LibTorch_C10_CUDA_LIBRARY}
                                                       INTERFACE_LINK_LIBRARIES "terrace::c10;terrace::cudart")
  endif()
endif()
