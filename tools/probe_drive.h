/// How fast the drive under a folder is, as the NVMe tier would use it, and what it takes to be that fast.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "integration/rates.h"
#include "offload/io_engine.h"

namespace terrace {

/// Writes a file of at most `most_bytes`, half the free space and 512 MiB, then writes and reads it in several ways for
/// a few seconds in all: first blocks of several sizes, then several numbers of the best blocks in flight. Of ways that
/// are within a twentieth of the fastest the one that takes the least memory is taken.
///
/// The file is an extent file: removed at the end, or by the next store there should the process be killed. Ends soon,
/// with figures that mean nothing, once `stop` says so. Throws IoError, also where there is no room for 2 MiB.
DriveRates probe_drive(const std::filesystem::path& folder, IoEngine& engine, std::uint64_t most_bytes,
                       const std::function<bool()>& stop);

}  // namespace terrace
