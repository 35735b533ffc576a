#include "memory/placement.h"

#include <algorithm>

namespace terrace {
namespace {

constexpr std::array<Tier, tier_count> order{Tier::host, Tier::nvme, Tier::device};

Tier first_with_room(const std::array<std::uint64_t, tier_count>& bytes, const RestingRoom& room) {
  for (const Tier tier : order) {
    if (bytes[index_of(tier)] <= room[index_of(tier)]) {
      return tier;
    }
  }
  return Tier::host;
}

}  // namespace

std::vector<Tier> choose_homes(std::span<const std::array<std::uint64_t, tier_count>> room_bytes,
                               const std::optional<Config::Shares>& shares, RestingRoom& room) {
  std::vector<Tier> homes;
  homes.reserve(room_bytes.size());
  const std::array<double, tier_count> share =
      shares ? std::array<double, tier_count>{shares->device, shares->host, shares->nvme}
             : std::array<double, tier_count>{};
  std::array<double, tier_count> placed{};
  double total = 0;
  for (const auto& bytes : room_bytes) {
    Tier home = Tier::host;
    if (shares) {
      // The tier that is furthest behind its share takes the next chunk.
      total += static_cast<double>(bytes[index_of(Tier::host)]);
      const auto behind = [&](Tier tier) { return share[index_of(tier)] * total - placed[index_of(tier)]; };
      home = *std::max_element(order.begin(), order.end(),
                               [&](Tier left, Tier right) { return behind(left) < behind(right); });
      placed[index_of(home)] += static_cast<double>(bytes[index_of(Tier::host)]);
    } else {
      home = first_with_room(bytes, room);
    }
    std::uint64_t& left = room[index_of(home)];
    left -= std::min(left, bytes[index_of(home)]);
    homes.push_back(home);
  }
  return homes;
}

std::uint64_t gradient_bytes_for_nvme(std::uint64_t lacking, const StepRates& rates) {
  const double read = rates.read_bytes_per_second;
  const double write = rates.write_bytes_per_second;
  if (read <= 0 || write <= 0 || rates.forward_seconds <= 0 || rates.backward_seconds <= 0) {
    return lacking;
  }
  const auto all = static_cast<double>(lacking);
  const double hidden_by_backward = write * rates.backward_seconds;
  // Each byte that a gradient takes off the states' saves a write behind forward.
  const double too_many_for_forward = write * (all / read + all / write - rates.forward_seconds);
  return static_cast<std::uint64_t>(std::clamp(std::max(hidden_by_backward, too_many_for_forward), 0.0, all));
}

}  // namespace terrace
