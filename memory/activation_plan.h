/// Which blocks of a model run again in backward, so that a step is shortest.
///
/// In the spirit of KARMA (Wahib et al., 2020) and ProTrain (Yang et al., 2024). Blocks run one after the other, and
/// in backward in the contrary order. What they save stays on the device as far as there is room: that of the first
/// blocks, which is wanted last, leaves behind computation and comes back behind it, and computation waits where
/// transfers are slower. A block that runs again saves nothing but its inputs. `play` goes through such a pass in
/// virtual time; a plan is improved by the change of one block, or of two, that makes the pass shortest, until there is
/// none.
#pragma once

#include <cstdint>
#include <vector>

namespace terrace {

struct BlockProfile {
  double forward_seconds = 0;
  double backward_seconds = 0;    ///< without what runs again
  std::uint64_t input_bytes = 0;  ///< kept until backward, whatever the plan
  std::uint64_t saved_bytes = 0;  ///< besides
  bool may_run_again = true;      ///< there is room for it within backward
};

struct PassProfile {
  std::vector<BlockProfile> blocks;  ///< in the order of forward
  std::uint64_t room_bytes = 0;      ///< of the device, for what blocks save
  double out_bytes_per_second = 0;   ///< at which activations leave the device
  double in_bytes_per_second = 0;    ///< and come back
};

struct PlayedPass {
  double forward_seconds = 0;                ///< infinite where a block does not fit
  double seconds = 0;                        ///< of forward and backward
  std::vector<std::uint64_t> leaving_bytes;  ///< of each block

  std::uint64_t all_leaving_bytes() const;
};

/// Whether each block runs again.
using Recomputed = std::vector<bool>;

/// `recomputed` has one value a block.
PlayedPass play(const PassProfile& pass, const Recomputed& recomputed);

/// The plan with the shortest pass that was found; of equal ones that which moves least, and then that which computes
/// least.
Recomputed plan_recompute(const PassProfile& pass);

/// The rates with which, nothing running again, the pass takes as long as it was seen to. A direction that nothing
/// waited for is unlimited.
void set_rates_as_seen(PassProfile& pass, double forward_seconds, double backward_seconds);

}  // namespace terrace
