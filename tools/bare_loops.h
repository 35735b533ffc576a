/// What the parts of a step cost alone: each a loop over the same number of bytes or elements that knows nothing of
/// tiers, chunks or sessions. They are the floors that steps are measured against.
///
/// Buffers are larger than caches and touched before they are timed. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace terrace {

class BareLoops {
 public:
  BareLoops();

  /// Of one core copying `bytes` from memory to memory.
  double copy_seconds(std::uint64_t bytes);
  /// Of one core taking the checksums of `bytes`, in blocks as they are written to NVMe.
  double checksum_seconds(std::uint64_t bytes);
  /// Of one core updating as many fp32 parameters with the AdamW kernel.
  double update_seconds(std::uint64_t elements);
  /// Of one core writing as many bytes.
  double fill_seconds(std::uint64_t bytes);
  /// Of one direction of a link of that rate carrying `bytes`: each block is copied, and there when the link has
  /// brought it.
  double link_seconds(std::uint64_t bytes, double bytes_per_second);
  /// Bytes per second, read and written, that all cores copy together.
  double memory_rate();

 private:
  std::vector<std::byte> from_;
  std::vector<std::byte> to_;
  std::vector<float> update_[4];  // parameter, gradient, momentum, variance
  std::uint64_t used_ = 0;        // so that no result can be left out
};

}  // namespace terrace
