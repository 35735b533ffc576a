# Finds liburing: liburing::liburing.

find_path(liburing_INCLUDE_DIR liburing.h)
find_library(liburing_LIBRARY uring)
mark_as_advanced(liburing_INCLUDE_DIR liburing_LIBRARY)

# Its headers name no version before 2.4.
get_filename_component(liburing_folder "${liburing_LIBRARY}" DIRECTORY)
if(EXISTS "${liburing_folder}/pkgconfig/liburing.pc")
  file(STRINGS "${liburing_folder}/pkgconfig/liburing.pc" liburing_VERSION REGEX "^Version:")
  string(REGEX REPLACE "^Version: *" "" liburing_VERSION "${liburing_VERSION}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(liburing REQUIRED_VARS liburing_LIBRARY liburing_INCLUDE_DIR
                                  VERSION_VAR liburing_VERSION)

if(liburing_FOUND AND NOT TARGET liburing::liburing)
  add_library(liburing::liburing UNKNOWN IMPORTED)
  set_target_properties(liburing::liburing PROPERTIES IMPORTED_LOCATION ${liburing_LIBRARY}
                                                      INTERFACE_INCLUDE_DIRECTORIES ${liburing_INCLUDE_DIR})
endif()
