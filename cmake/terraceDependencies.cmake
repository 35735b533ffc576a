# What the package needs. A file of its own because find_dependency returns where one is missing: from here, so that
# whoever includes this can put things back.

include(CMakeFindDependencyMacro)
find_dependency(Threads)
find_dependency(fmt)
find_dependency(spdlog)
find_dependency(tomlplusplus)
find_dependency(xxHash)
find_dependency(liburing)
find_dependency(hwloc)
find_dependency(hwy)
find_dependency(TBB)
if(terrace_wants_libtorch)
  find_dependency(nlohmann_json)
  find_dependency(LibTorch 2.11...<2.12)
endif()
