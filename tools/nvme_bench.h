/// `terrace bench nvme`: how fast the transfer service reads and writes a drive, against what else does.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace terrace {

struct BenchNvmeOptions {
  std::filesystem::path folder;
  std::vector<std::uint64_t> blocks{std::uint64_t{64} << 10U, std::uint64_t{256} << 10U, std::uint64_t{1} << 20U};
  std::vector<std::uint64_t> depths{8, 32};
  std::uint64_t bytes = std::uint64_t{256} << 20U;  ///< of a sample, each way
  int rounds = 8;
  int samples = 4;    ///< pairs in a round
  bool busy = false;  ///< besides, every core computes
  bool json = false;
};

/// Reads, writes and both at once, for each size of block and depth. In each round the service, the engine alone, a
/// bare io_uring loop, such loops with checksums, one each way, such a loop beside a thread that takes checksums, and
/// fio where it is installed, take turns. Prints rates, the service's share of the best of bare loop and fio and of the
/// loop beside checksums, how full its queue was while work waited, and processor time by byte. Returns false after
/// Ctrl-C, having printed the cases that were measured. Throws IoError, also where the file system has no O_DIRECT.
bool bench_nvme(const BenchNvmeOptions& options);

}  // namespace terrace
