#include "tools/exit_code.h"

#include <c10/util/Exception.h>

#include "base/error.h"

namespace terrace {

Failure failure_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const ConfigError& failure) {
    return {ExitCode::usage, failure.what()};
  } catch (const OutOfMemory& failure) {
    return {ExitCode::out_of_memory, failure.what()};
  } catch (const IoError& failure) {
    return {ExitCode::io, failure.what()};
  } catch (const CorruptData& failure) {
    return {ExitCode::corrupt, failure.what()};
  } catch (const c10::OutOfMemoryError& failure) {
    return {ExitCode::out_of_memory, failure.what_without_backtrace()};
  } catch (const c10::Error& failure) {
    return {ExitCode::internal, failure.what_without_backtrace()};
  } catch (const std::exception& failure) {
    return {ExitCode::internal, failure.what()};
  } catch (...) {
    return {ExitCode::internal, "unknown error"};
  }
}

}  // namespace terrace
