/// What the program may wait for.
///
/// A stall is time in which a thread of the program waits for memory and has left nothing to compute: where the device
/// computes behind the program, as a GPU does, it begins when that has computed what was issued before the wait. Each
/// has one cause at each moment; a wait that changes its cause is several stalls.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace terrace {

enum class StallCause : std::uint8_t {
  nvme_to_host,    ///< bytes are on their way from NVMe, to the host or through it to the device
  host_to_device,  ///< bytes are on their way to the device, or begin there
  device_to_host,  ///< bytes are on their way from the device
  device_room,     ///< something has to leave the device first
  host_room,       ///< something has to leave the host first
  nvme_room,       ///< something has to leave NVMe first
  update           ///< another thread updates what is wanted, or sums it up for the gradient norm
};
inline constexpr std::size_t stall_cause_count = 7;
inline constexpr std::array<StallCause, stall_cause_count> all_stall_causes{
    StallCause::nvme_to_host, StallCause::host_to_device, StallCause::device_to_host, StallCause::device_room,
    StallCause::host_room,    StallCause::nvme_room,      StallCause::update};

constexpr std::size_t index_of(StallCause cause) noexcept { return static_cast<std::size_t>(cause); }

constexpr std::string_view name_of(StallCause cause) noexcept {
  constexpr std::array<std::string_view, stall_cause_count> names{
      "nvme→host", "host→device", "device→host", "room on device", "room on host", "room on nvme", "update"};
  return names[index_of(cause)];
}

}  // namespace terrace
