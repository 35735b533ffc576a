#include "offload/extent_format.h"

#include <xxhash.h>

namespace terrace {

std::uint64_t own_checksum_of(const ExtentRecord& record, std::uint64_t extent) noexcept {
  return XXH3_64bits_withSeed(&record, offsetof(ExtentRecord, own_checksum), extent);
}

}  // namespace terrace
