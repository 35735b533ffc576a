/// What the `terrace` program does.
#pragma once

namespace terrace {

/// Reads the command line, carries it out, and returns the exit code. Errors are told on standard error. Never throws.
int run_command(int argc, char** argv) noexcept;

}  // namespace terrace
