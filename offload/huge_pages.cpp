#include "offload/huge_pages.h"

#include <fstream>

namespace terrace {

std::string why_no_huge_pages(const std::filesystem::path& root) {
  const std::filesystem::path setting = root / "sys/kernel/mm/transparent_hugepage/shmem_enabled";
  std::ifstream file(setting);
  std::string words;
  if (!std::getline(file, words)) return "this kernel has no transparent huge pages for shared memory";
  for (const char* refusal : {"[never]", "[deny]"}) {
    if (words.find(refusal) != std::string::npos) {
      return setting.string() + " says " + refusal + " (write \"advise\" there)";
    }
  }
  return "";
}

}  // namespace terrace
