#pragma once

#include <memory>
#include <string_view>

#include "offload/io_engine.h"

namespace terrace {

/// "io_uring", "threads", or "auto": io_uring where it is available, else threads, with a warning that says why.
/// Throws ConfigError for any other choice, and for "io_uring" where that is not available.
std::unique_ptr<IoEngine> make_io_engine(std::string_view choice);

}  // namespace terrace
