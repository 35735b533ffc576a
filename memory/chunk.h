/// What a chunk is, and what may be asked of one.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "offload/tier.h"
#include "offload/transfer.h"

namespace terrace {

/// A chunk's stable name: dense, given in the order of registration. That of a chunk which has been removed may be
/// given to another of the same kind, size and home only.
using ChunkId = std::uint32_t;

/// A chunk: a run of bytes of one kind, the unit of residency and movement. Chunks of one index across
/// kinds hold the same parameters at the same element offsets.
struct ChunkInfo {
  Kind kind = Kind::parameter;
  std::uint32_t index = 0;
  std::uint64_t bytes = 0;
  /// Where the chunk rests. Its room there is given up when it is removed.
  Tier home = Tier::host;
  /// What a copy takes from each tier's budget (bytes rounded up to the tier's granules).
  std::array<std::uint64_t, tier_count> room_bytes{};
};

/// Whether a chunk that has no bytes reads as zeros. Gradients and activations are written as a whole before any of
/// them is read, so what their chunks begin with is not worth the memory's time.
constexpr bool begins_as_zeros(Kind kind) { return kind != Kind::gradient && kind != Kind::activation; }

/// As a message names it: "parameter chunk 7".
inline std::string describe(const ChunkInfo& info) {
  return std::string(name_of(info.kind)) + " chunk " + std::to_string(info.index);
}

/// What is done with bytes.
enum class Access : std::uint8_t { read, write };

/// One operand: the bytes of `chunk`, wanted at `tier`. `write` means that they may change there.
struct ChunkAccess {
  ChunkId chunk = 0;
  Tier tier = Tier::device;
  Access mode = Access::read;
};

/// One movement of a whole chunk. `fill` arrivals come from nowhere: a chunk that was never written, or
/// whose bytes were discarded, begins as zeros or as anything (see `begins_as_zeros`).
struct Transfer {
  ChunkId chunk = 0;
  bool fill = false;
  Tier from = Tier::host;
  Tier to = Tier::device;
  TransferPriority priority = TransferPriority::demand;
};

}  // namespace terrace
