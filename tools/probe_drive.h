/// How fast the drive under a folder is, as the NVMe tier would use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>

#include "offload/io_engine.h"
#include "tools/rates.h"

namespace terrace {

/// Writes a file of at most `most_bytes` and of half the free space, then reads it, for two seconds each, in blocks of
/// `block_bytes`, a multiple of 4096, with as many in flight as the transfer service has. The file is an extent file:
/// removed at the end, or by the next store there should the process be killed. Ends soon, with figures that mean
/// nothing, once `stop` says so. Throws IoError, also where there is no room for the blocks in flight.
DriveRates probe_drive(const std::filesystem::path& folder, IoEngine& engine, std::size_t block_bytes,
                       std::uint64_t most_bytes, const std::function<bool()>& stop);

}  // namespace terrace
