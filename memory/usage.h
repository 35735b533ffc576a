/// What a session uses, has used at most, and has moved: a snapshot of plain numbers, in bytes.
#pragma once

#include <array>
#include <cstdint>

#include "memory/stall.h"
#include "offload/tier.h"

namespace terrace {

class MemoryUsage {
 public:
  /// One tier's figures.
  struct OfTier {
    std::uint64_t capacity = 0;
    std::uint64_t now = 0;
    std::uint64_t peak = 0;
    std::uint64_t step_peak = 0;   ///< highest during the last complete step
    std::uint64_t chunk_peak = 0;  ///< highest of all chunks together
    std::uint64_t held = 0;        ///< what cannot leave now
    std::uint64_t needed = 0;      ///< highest of what could not leave at one moment
    std::array<std::uint64_t, kind_count> now_by_kind{};
    std::array<std::uint64_t, kind_count> peak_by_kind{};  ///< each its own highest: they need not coincide
  };
  using Moved = std::array<std::array<std::uint64_t, kind_count>, link_count>;

  /// The budget of a tier; 0 where there is no such tier.
  std::uint64_t capacity(Tier tier) const { return tiers[index_of(tier)].capacity; }
  std::uint64_t now(Tier tier) const { return tiers[index_of(tier)].now; }
  std::uint64_t now(Tier tier, Kind kind) const { return tiers[index_of(tier)].now_by_kind[index_of(kind)]; }
  std::uint64_t peak(Tier tier) const { return tiers[index_of(tier)].peak; }
  std::uint64_t peak(Tier tier, Kind kind) const { return tiers[index_of(tier)].peak_by_kind[index_of(kind)]; }
  std::uint64_t step_peak(Tier tier) const { return tiers[index_of(tier)].step_peak; }
  std::uint64_t chunk_peak(Tier tier) const { return tiers[index_of(tier)].chunk_peak; }
  /// The smallest budget of the device with which the run up to here goes as it went: the most that could not leave it
  /// at one moment, of operands, the program's tensors, and chunks that rest there. What is cached or brought ahead of
  /// need is not in it. Once a whole step has run it is exact to the byte: with so much a program whose steps are alike
  /// runs, with less it is refused. That holds for chunks of this size, and for a program whose own tensors are the
  /// same in each run; where several threads use the device, for what they happened to use at one moment. An upper
  /// bound on a CUDA device, where the pool of the program's tensors counts as it has grown. Of the host an upper
  /// bound: with less, more of what has no place given rests or is spilled elsewhere.
  std::uint64_t needed(Tier tier) const { return tiers[index_of(tier)].needed; }
  /// Whether parameters share chunks in the order of their first use (placement.order), not of construction.
  bool laid_out_by_use = false;
  /// Of a chunk of parameters (placement.chunk); larger parameters have chunks of their own size.
  std::uint64_t chunk_bytes = 0;
  std::uint64_t block_bytes = 0;         ///< of what a chunk takes whole ones on host and NVMe (io.block)
  std::uint64_t chunk_room_bytes = 0;    ///< what chunks of parameters, gradients and states take where they rest
  std::uint64_t chunk_wasted_bytes = 0;  ///< of that, what holds nothing: it ends a whole block, or an aligned run

  /// Bytes that have crossed a link since the session began.
  std::uint64_t moved(Link link, Kind kind) const { return bytes_moved[index_of(link)][index_of(kind)]; }
  std::uint64_t moved(Link link) const { return sum_over_kinds(bytes_moved, link); }

  std::array<OfTier, tier_count> tiers{};
  Moved bytes_moved{};
  /// Time in which the program has waited and the device had nothing to compute, since the session began; by cause it
  /// sums to the whole. Where several threads of the program wait at once, each counts.
  double stall_seconds = 0;
  std::array<double, stall_cause_count> stall_seconds_by_cause{};
  /// Time that the program's threads have spent on updates themselves, without what they waited for in them.
  double update_seconds = 0;
  /// What these were when the last step ended: a step's own figures are the differences from one end to the next.
  struct AtStepEnd {
    Moved bytes_moved{};
    std::array<double, stall_cause_count> stall_seconds_by_cause{};
    double update_seconds = 0;

    std::uint64_t moved(Link link) const { return sum_over_kinds(bytes_moved, link); }
  };
  AtStepEnd at_step_end;
  /// Transfers to the device that were started only when somebody waited for the bytes.
  std::uint64_t demand_fetches = 0;

 private:
  static std::uint64_t sum_over_kinds(const Moved& moved, Link link) {
    std::uint64_t sum = 0;
    for (const std::uint64_t bytes : moved[index_of(link)]) {
      sum += bytes;
    }
    return sum;
  }
};

}  // namespace terrace
