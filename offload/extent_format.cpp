#include "offload/extent_format.h"

#include <span>

#include "offload/checksum.h"

namespace terrace {

std::uint64_t own_checksum_of(const ExtentRecord& record, std::uint64_t extent) noexcept {
  return checksum_of(std::as_bytes(std::span(&record, 1)).first(offsetof(ExtentRecord, own_checksum)), extent);
}

}  // namespace terrace
