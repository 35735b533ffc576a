/// Where chunks rest.
///
/// By shares, chunks of a kind are spread evenly over the tiers in proportion to their bytes. By default
/// they go to the first tier with room in the order host, NVMe, device: the update runs on the host, so a
/// chunk is nearest to its use there, and the device is left to what computes. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/config.h"
#include "offload/tier.h"

namespace terrace {

/// Bytes of a tier that chunks may still rest in: its budget less what is used and what must stay free to
/// work in.
using RestingRoom = std::array<std::uint64_t, tier_count>;

/// Chooses a home for each chunk, in order, and takes its room from `room`. `room_bytes` is what each chunk
/// takes on each tier. Shares are followed even where there is no room: taking it is what fails then.
std::vector<Tier> choose_homes(std::span<const std::array<std::uint64_t, tier_count>> room_bytes,
                               const std::optional<Config::Shares>& shares, RestingRoom& room);

/// What a step computes, and how fast the drive under NVMe is, together with all others that it is striped over. 0
/// where that is not known.
struct StepRates {
  double forward_seconds = 0;
  double backward_seconds = 0;
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
};

/// Where `lacking` bytes of gradients that are written and read once a step, and of states, have no room on the host:
/// how much of it gradients should be, at most. They are written to NVMe within backward, and read behind the next
/// forward; states are read and written behind that forward. So gradients go there as long as the drive is done with
/// them before backward is, or with the rest only after forward: then both end together. All where nothing is known.
std::uint64_t gradient_bytes_for_nvme(std::uint64_t lacking, const StepRates& rates);

}  // namespace terrace
