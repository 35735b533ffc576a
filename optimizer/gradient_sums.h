/// Sums of squares of gradients, taken on the host while backward goes on.
///
/// A gradient norm needs every gradient, and where the host has no room for all of them most have left for NVMe by the
/// end of backward. So those that backward seems to be done with are summed up as they come to the host, by a thread of
/// its own, which reads them where the norm would: every sum is the same to the bit. It counts as long as nothing has
/// been written to its chunk since. Where there is none, for whatever reason, whoever wants the norm reads the
/// gradient.
///
/// Threads: any, several at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "memory/access_stream.h"
#include "offload/processors.h"
#include "optimizer/element_type.h"
#include "optimizer/update_threads.h"

namespace terrace {

/// A run of elements of one parameter's gradient within its chunk.
struct GradientRun {
  std::uint64_t element_offset = 0;
  std::uint64_t elements = 0;

  bool operator==(const GradientRun&) const = default;
};

/// A chunk of gradients on the host, which is held there.
struct GradientsOnHost {
  ElementType type = ElementType::float32;
  std::span<std::byte* const> granules;
  std::uint64_t granule_bytes = 0;

  /// The sum of squares of the `index`-th block of a run (see gradient_norm.h).
  double sum_of_block(const GradientRun& run, std::size_t index) const noexcept;
};

class GradientSums {
 public:
  /// Both outlive it; it is the only one that reads of the stream's chunks on arrival. Its thread runs on `processors`.
  GradientSums(AccessStream& stream, const UpdateThreads& threads, const Processors& processors);
  ~GradientSums();
  GradientSums(const GradientSums&) = delete;
  GradientSums& operator=(const GradientSums&) = delete;

  /// Backward is probably done with the chunk's gradients, which lie in these runs. Replaces what was known of it.
  void expect(ChunkId gradient, ElementType type, std::vector<GradientRun> runs);
  /// The run's sum of squares, if it is known and nothing was written to the chunk since.
  std::optional<double> of(ChunkId gradient, const GradientRun& run) const;
  /// A norm over these chunks is to be found: what is not being read of them by now is not waited for any more.
  void expect_no_more(std::span<const ChunkId> gradients);

 private:
  struct Expected {
    ElementType type = ElementType::float32;
    std::vector<GradientRun> runs;
    std::vector<double> sums;      ///< by run; empty until they are known
    std::uint64_t writes = 0;      ///< to the chunk, before they were taken
    std::uint64_t generation = 0;  ///< tells it from what was expected of the chunk before
  };

  void work();
  void sum_up(const HostReading& reading);

  AccessStream& stream_;
  const UpdateThreads& threads_;
  mutable std::mutex mutex_;  ///< taken before the stream's
  std::unordered_map<ChunkId, Expected> expected_;
  std::uint64_t generations_ = 0;
  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace terrace
