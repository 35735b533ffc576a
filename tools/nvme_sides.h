/// The ways to a drive that `terrace bench nvme` compares, each under the same load: the transfer service, its I/O
/// engine alone, and fio. The bare loop is in bare_nvme.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "offload/io_engine.h"

namespace terrace {

/// What is moved in one sample: so many bytes each way, whole blocks.
struct NvmeLoad {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  std::size_t block_bytes = 0;
  std::size_t depth = 0;  ///< each way
};

/// Between host and an NVMe store, checksums and records included. Not thread-safe.
class ServiceSide {
 public:
  /// Writes all that is read later. Throws IoError.
  ServiceSide(const std::filesystem::path& folder, const NvmeLoad& load);
  ~ServiceSide();
  ServiceSide(const ServiceSide&) = delete;
  ServiceSide& operator=(const ServiceSide&) = delete;

  double seconds();
  /// Blocks with the drive, on average over the time in which more waited, in all samples; over the configured depth.
  double depth_share() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// The engine's queues on an extent file, without checksums: one thread, a queue each way. Not thread-safe.
class EngineSide {
 public:
  EngineSide(const std::filesystem::path& folder, const NvmeLoad& load);
  ~EngineSide();
  EngineSide(const EngineSide&) = delete;
  EngineSide& operator=(const EngineSide&) = delete;

  double seconds();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// fio's own measure of the same load, in bytes a second; nothing where fio is not installed or fails. Its file is made
/// in the folder when it is missing, and removed at the end.
class FioSide {
 public:
  FioSide(std::filesystem::path folder, const NvmeLoad& load);
  ~FioSide();
  FioSide(const FioSide&) = delete;
  FioSide& operator=(const FioSide&) = delete;

  std::optional<double> bytes_per_second();

 private:
  const NvmeLoad load_;
  const std::filesystem::path file_;
};

}  // namespace terrace
