#include "optimizer/prefetching.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace terrace {
namespace {

bool is_amd_from_zen_5() noexcept {
#if defined(__x86_64__)
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0 || ebx != signature_AMD_ebx || ecx != signature_AMD_ecx ||
      edx != signature_AMD_edx || __get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) {
    return false;
  }
  const unsigned family = (eax >> 8U & 0xfU) + (eax >> 20U & 0xffU);
  return family >= 0x1a;
#else
  return false;
#endif
}

}  // namespace

bool fills_second_cache_itself() noexcept {
  static const bool fills = is_amd_from_zen_5();
  return fills;
}

}  // namespace terrace
