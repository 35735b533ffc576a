#include "offload/huge_pages.h"

#include <cstdint>
#include <fstream>
#include <sys/mman.h>

namespace terrace {

std::byte* map_from_huge_page(std::size_t bytes) {
  constexpr std::size_t small_page = 4096;
  constexpr std::size_t page = huge_page_bytes;
  void* const mapped =
      ::mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* const first = static_cast<std::byte*>(mapped);
  const std::size_t before = (page - reinterpret_cast<std::uintptr_t>(mapped) % page) % page;
  const std::size_t end = (before + bytes + small_page - 1) / small_page * small_page;
  if (before > 0) ::munmap(first, before);
  if (end < bytes + page) ::munmap(first + end, bytes + page - end);
  return first + before;
}

std::string why_no_huge_pages(const std::filesystem::path& root) {
  const std::filesystem::path setting = root / "sys/kernel/mm/transparent_hugepage/enabled";
  std::ifstream file(setting);
  std::string words;
  if (!std::getline(file, words)) return "this kernel has no transparent huge pages";
  if (words.find("[never]") != std::string::npos) return setting.string() + " says [never] (write \"madvise\" there)";
  return "";
}

}  // namespace terrace
