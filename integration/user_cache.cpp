#include "integration/user_cache.h"

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <random>
#include <system_error>

#include "base/log.h"

namespace terrace {

namespace fs = std::filesystem;

namespace {

/// Returns 0 or an errno value.
int replace_file(const fs::path& path, const std::string& text) {
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  if (error) return error.value();
  // Another process, perhaps of another container, may be about to do the same.
  const fs::path beside = path.string() + "." + std::to_string(std::random_device()());
  errno = 0;
  std::ofstream file(beside, std::ios::binary);
  file << text;
  file.close();
  if (!file) {
    const int error_number = errno != 0 ? errno : EIO;
    fs::remove(beside, error);
    return error_number;
  }
  fs::rename(beside, path, error);
  if (!error) return 0;
  const int error_number = error.value();
  fs::remove(beside, error);
  return error_number;
}

}  // namespace

fs::path user_cache_path(const fs::path& name) {
  const auto folder_in = [](const char* variable) {
    const char* const value = std::getenv(variable);
    // A relative one is to be ignored, says the XDG Base Directory Specification.
    return value != nullptr && fs::path(value).is_absolute() ? fs::path(value) : fs::path();
  };
  fs::path cache = folder_in("XDG_CACHE_HOME");
  const fs::path home = folder_in("HOME");
  if (cache.empty() && !home.empty()) cache = home / ".cache";
  return cache.empty() ? fs::path() : cache / "terrace" / name;
}

bool keep_in_cache(const fs::path& path, const std::string& text, const std::string& what) {
  const int error_number = replace_file(path, text);
  if (error_number == 0) return true;
  log(LogLevel::warning,
      what + " not kept: writing " + path.string() + " failed: " + std::generic_category().message(error_number));
  return false;
}

}  // namespace terrace
