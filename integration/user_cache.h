/// Files that Terrace keeps from one run to the next.
#pragma once

#include <filesystem>
#include <string>

namespace terrace {

/// `name` in the user's cache folder for Terrace: $XDG_CACHE_HOME, or else ~/.cache. Empty where there is neither.
std::filesystem::path user_cache_path(const std::filesystem::path& name);

/// Replaces the file at once, so that nobody ever reads half of one, and makes its folder. Where that fails it says in
/// a warning that `what`, such as "the rates are", not kept, and returns false.
bool keep_in_cache(const std::filesystem::path& path, const std::string& text, const std::string& what);

}  // namespace terrace
