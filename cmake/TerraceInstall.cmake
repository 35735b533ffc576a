# cmake --install: libraries, headers, the command, and the package that find_package(terrace) finds.
#
# What needs LibTorch is exported apart, so that find_package(terrace COMPONENTS memory) does without it.

include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/terrace)

get_property(floors GLOBAL PROPERTY TERRACE_FLOORS)
set(torch_free ${floors})
if(TARGET terrace_integration)
  list(REMOVE_ITEM torch_free terrace_integration)
  install(TARGETS terrace_all terrace_integration EXPORT terraceLibTorchTargets
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT terraceLibTorchTargets NAMESPACE terrace:: DESTINATION ${package_dir})
else()
  install(TARGETS terrace_all EXPORT terraceTargets)
endif()
install(TARGETS ${torch_free} EXPORT terraceTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT terraceTargets NAMESPACE terrace:: DESTINATION ${package_dir})

foreach(floor ${floors})
  string(REPLACE terrace_ "" folder ${floor})
  file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.h)
  list(FILTER headers EXCLUDE REGEX "/pch\\.h$")
  install(FILES ${headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/terrace/${folder})
endforeach()

if(TARGET terrace_integration)
  install(FILES include/terrace/terrace.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/terrace)
  set(terrace_has_libtorch ON)
  get_filename_component(terrace_libtorch_dir ${LibTorch_INCLUDE_DIR}/.. ABSOLUTE)
endif()
if(TARGET terrace_tool)
  install(TARGETS terrace_tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

list(TRANSFORM torch_free REPLACE "^terrace_" "" OUTPUT_VARIABLE terrace_torch_free_components)
configure_package_config_file(cmake/terraceConfig.cmake.in terraceConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(terraceConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/terraceConfig.cmake ${PROJECT_BINARY_DIR}/terraceConfigVersion.cmake
              cmake/terraceDependencies.cmake cmake/FindxxHash.cmake cmake/Findliburing.cmake cmake/Findhwloc.cmake
              cmake/FindLibTorch.cmake
        DESTINATION ${package_dir})
