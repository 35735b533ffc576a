/// What failed I/O on a file says: what was attempted, on what, why it failed, and the way out.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "offload/io_engine.h"

namespace terrace {

/// "nvme: VERB of LENGTH B at offset OFFSET PREPOSITION PATH failed: CAUSE", with a hint where there is one.
IoError io_error(std::string_view verb, std::string_view preposition, const IoFile& file, std::uint64_t offset,
                 std::uint64_t length_bytes, int error_number);

IoError io_error(const IoOperation& operation, int error_number);
/// The operation came to a stop after `done` of its bytes without the system naming an error.
IoError io_stopped_short(const IoOperation& operation, std::uint64_t done);

}  // namespace terrace
