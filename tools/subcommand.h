/// What the subcommands of the tool are made of.
#pragma once

#include <charconv>
#include <cstdint>
#include <functional>
#include <limits>
#include <system_error>

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
        // CLI11 takes the largest number for what is larger, and 010 for 8.
        std::int64_t value = 0;
        const char* const end = text.data() + text.size();
        const auto [last, error] = std::from_chars(text.data(), end, value);
        const bool begins_with_zero = text.size() > 1 && text.front() == '0';
        if (error == std::errc() && last == end && !begins_with_zero && value >= least) return std::string();
        return "found " + text + "; accepted: a whole number from " + std::to_string(least) +
               (error == std::errc::result_out_of_range
                    ? " to " + std::to_string(std::numeric_limits<std::int64_t>::max())
                    : "");
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
