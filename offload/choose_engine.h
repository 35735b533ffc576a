#pragma once

#include <memory>
#include <string_view>

#include "offload/io_engine.h"

namespace terrace {

/// The engine that `io.engine` names: "auto" (io_uring where it is available, which is logged once where it is not),
/// "io_uring" or "threads". Throws ConfigError for one that is not available.
std::unique_ptr<IoEngine> make_io_engine(std::string_view choice);

}  // namespace terrace
