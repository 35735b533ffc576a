/// Plain I/O on the calling thread, for what is small or rare. Every call moves all bytes or throws IoError with path,
/// offset, length and cause. Thread-safe, also on one file.
#pragma once

#include <cstdint>

#include "offload/io_engine.h"

namespace terrace {

/// Carries the operation out.
void run_io(const IoOperation& operation);

/// Sets aside space for a range and grows the file to hold it, so that a full disk is told here and not by a later
/// write. False where the file system cannot do that; nothing has changed then.
bool set_space_aside(const IoFile& file, std::uint64_t offset, std::uint64_t length_bytes);

}  // namespace terrace
