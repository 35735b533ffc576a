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

}  // namespace terrace
