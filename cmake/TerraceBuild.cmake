# Settings that change how fast a build is, not what it makes, and the sanitizers.

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_EXTENSIONS OFF)

# A precompiled header serves only sources compiled with the same flags, and -fPIE (executables)
# differs from -fPIC (libraries): everything is -fPIC.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_COMPILE_OPTIONS_PIE -fPIC)

if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(CCACHE_PROGRAM ccache)
  if(CCACHE_PROGRAM)
    # What ccache asks for before it caches sources that use a precompiled header, and where paths are taken as relative:
    # a source that several build folders compile in the same way is compiled once.
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros
                                    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} ${CCACHE_PROGRAM})
  endif()
endif()

# The default linker takes several times longer.
include(CheckLinkerFlag)
foreach(linker mold lld)
  find_program(TERRACE_LINKER_${linker} NAMES ld.${linker})
  if(TERRACE_LINKER_${linker})
    check_linker_flag(CXX -fuse-ld=${linker} TERRACE_LINKS_WITH_${linker})
    if(TERRACE_LINKS_WITH_${linker})
      add_link_options(-fuse-ld=${linker})
      break()
    endif()
  endif()
endforeach()

# A source that includes LibTorch takes up to 3 GiB to compile.
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
cmake_host_system_information(RESULT memory_mib QUERY TOTAL_PHYSICAL_MEMORY)
math(EXPR jobs "${memory_mib} / 3072")
if(jobs GREATER cores)
  set(jobs ${cores})
elseif(jobs LESS 1)
  set(jobs 1)
endif()
set(TERRACE_JOBS ${jobs} CACHE STRING "Most compilations at a time")
set_property(GLOBAL PROPERTY JOB_POOLS compile=${TERRACE_JOBS} link=${TERRACE_JOBS})
set(CMAKE_JOB_POOL_COMPILE compile)
set(CMAKE_JOB_POOL_LINK link)

if(TERRACE_SANITIZE)
  # -Og with line numbers only: half the compile time of -O1 -g.
  add_compile_options(-fsanitize=${TERRACE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -Og -g1)
  add_link_options(-fsanitize=${TERRACE_SANITIZE})
endif()
