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

  /// Where its blocks are: those that are read, then those that are written.
  std::filesystem::path file() const;
  static std::uint64_t first_offset() noexcept;

  double seconds();
  /// The same, to see how full its queues are. Looking takes time of its own.
  void look();
  /// Blocks with the drive, on average over the time in which more waited and somebody looked; over the configured
  /// depth.
  double depth_share() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// The engine's queue on the file of a service, without checksums, by one thread. It may write what it likes where the
/// service does nothing but write. Not thread-safe.
class EngineSide {
 public:
  EngineSide(const ServiceSide& service, const NvmeLoad& load);
  ~EngineSide();
  EngineSide(const EngineSide&) = delete;
  EngineSide& operator=(const EngineSide&) = delete;

  double seconds();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// fio's own measure of such a load on the file of a service, in bytes a second; nothing where fio is not installed or
/// fails, and for loads both ways, of which fio would mix regions.
std::optional<double> fio_bytes_per_second(const ServiceSide& service, const NvmeLoad& load);

}  // namespace terrace
