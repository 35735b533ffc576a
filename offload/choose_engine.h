#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "offload/io_engine.h"
#include "offload/processors.h"

namespace terrace {

/// "io_uring", "threads", or "auto": io_uring where it is available, else threads, with a warning that says why.
/// Threads of the engine's own run on `processors`. Throws ConfigError for any other choice, and for "io_uring" where
/// that is not available.
std::unique_ptr<IoEngine> make_io_engine(std::string_view choice, const Processors& processors = {});

/// For tests of what happens when a drive does wrong, and for nothing else: what `make_io_engine` makes from now on is
/// handed to `decorate`, and what that returns is used in its place. Null ends it. Not while an engine is being made.
void decorate_io_engines(std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)> decorate);

}  // namespace terrace
