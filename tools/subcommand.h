/// What the subcommands of the tool are made of.
#pragma once

#include <cerrno>
#include <cstdint>
#include <functional>

#include <CLI/CLI.hpp>

#include "tools/exit_code.h"

namespace terrace {

struct Subcommand {
  CLI::App* app;                  ///< which says whether it is the one that was given
  std::function<ExitCode()> run;  ///< with what was parsed
};

/// Whole numbers only; what CLI11 brings shows in the help, and names the largest double.
inline CLI::Validator at_least(std::int64_t least) {
  return CLI::Validator(
      [least](const std::string& text) {
        std::int64_t value = 0;
        errno = 0;  // CLI11 takes the largest number for what is larger
        const bool whole = CLI::detail::lexical_cast(text, value) && errno != ERANGE && value >= least;
        return whole ? std::string() : "found " + text + "; accepted: a whole number from " + std::to_string(least);
      },
      "");
}

/// An unset variable of the shell gives an empty name, and must not give a run that saves nothing. `what` is accepted.
inline CLI::Validator name_of_a(const std::string& what) {
  return CLI::Validator(
      [what](const std::string& text) { return text.empty() ? "found nothing; accepted: a " + what : std::string(); },
      "");
}

inline CLI::Validator folder_name() { return name_of_a("folder"); }
inline CLI::Validator file_name() { return name_of_a("file"); }

}  // namespace terrace
