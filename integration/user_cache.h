/// Files that Terrace keeps from one run to the next.
#pragma once

#include <filesystem>
#include <string>

namespace terrace {

/// `name` in the user's cache folder for Terrace: $XDG_CACHE_HOME, or else ~/.cache. Empty where there is neither.
std::filesystem::path user_cache_path(const std::filesystem::path& name);

/// Replaces the file at once, so that nobody ever reads half of one, and makes its folder. Returns 0 or an errno value.
int replace_file(const std::filesystem::path& path, const std::string& text);

}  // namespace terrace
