/// Memory that the system may put in huge pages, which are cheaper to touch first and to find later than those of 4
/// KiB.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace terrace {

inline constexpr std::size_t huge_page_bytes = std::size_t{2} << 20U;

/// A private mapping of so many bytes, rounded up to whole pages of 4 KiB, that begins with a huge page; it asks for
/// none. Null where the system refuses; errno says why.
std::byte* map_from_huge_page(std::size_t bytes);

/// Why the system gives none to who asks (MADV_HUGEPAGE); empty where it does. `root` is where /sys is found.
std::string why_no_huge_pages(const std::filesystem::path& root = "/");

}  // namespace terrace
