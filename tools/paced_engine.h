/// A drive of a given speed, for benchmarks: what is read and written through it takes as long as its rate says.
///
/// Drives of shared machines change their speed by half within seconds, so that a step on one cannot be compared with a
/// floor measured on it. All bytes do move; their completions come no sooner than a drive of that rate would send them,
/// one operation after the other, whichever queue they come from.
#pragma once

#include <cstdint>
#include <memory>

#include "offload/emulated_link.h"
#include "offload/io_engine.h"

namespace terrace {

class PacedEngine final : public IoEngine {
 public:
  /// The rate is that of reads and writes together, and below what the drive can do, or it shows nothing.
  PacedEngine(std::unique_ptr<IoEngine> engine, std::uint64_t bytes_per_second);

  std::string_view name() const noexcept override { return engine_->name(); }
  std::unique_ptr<IoQueue> open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered = {},
                                      std::span<const IoFile* const> files = {}) override;

 private:
  const std::unique_ptr<IoEngine> engine_;
  const std::shared_ptr<EmulatedLink> pace_;  // shared by the queues, which may outlive the engine
};

}  // namespace terrace
