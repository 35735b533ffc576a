/// The errors of transfers, as
///
///     nvme: write of 4096 B at offset 8192 to /data/extents.0 failed: No space left on device (ENOSPC)
///       hint: free space or lower nvme.memory
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/error.h"
#include "offload/io_engine.h"

namespace terrace {

IoError transfer_failed(const IoOperation& operation, int error_number);
/// A read that met the end of the file after `moved` bytes.
IoError end_of_file(const IoOperation& operation, std::size_t moved);
/// A write of which the kernel took no further byte after `moved`.
IoError nothing_taken(const IoOperation& operation, std::size_t moved);
/// Space that could not be set aside.
IoError reservation_failed(const IoFile& file, std::uint64_t offset, std::uint64_t length_bytes, int error_number);

}  // namespace terrace
