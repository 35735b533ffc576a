/// Small transfers for which the calling thread can wait. They fail as IoOperations do, by throwing IoError.
/// Thread-safe, also on one file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "offload/io_engine.h"

namespace terrace {

void read_file_at(const IoFile& file, std::uint64_t offset, std::span<std::byte> bytes);
void write_file_at(const IoFile& file, std::uint64_t offset, std::span<const std::byte> bytes);

/// Whether its path still names it, and no file that has taken its place.
bool has_its_name(const IoFile& file) noexcept;

/// Has the file system set space aside for a range and grows the file to hold it, so that a full disk is told here and
/// not by a later write. False where the file system cannot do that (nothing has changed then).
bool set_space_aside(const IoFile& file, std::uint64_t offset, std::uint64_t length_bytes);

}  // namespace terrace
