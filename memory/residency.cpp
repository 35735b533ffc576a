#include "memory/residency.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace terrace {

std::string_view name_of(CopyState state) noexcept {
  constexpr std::array<std::string_view, 5> names{"absent", "reserved", "arriving", "valid", "leaving"};
  return names[static_cast<std::size_t>(state)];
}

std::string_view name_of(CopyStep step) noexcept {
  constexpr std::array<std::string_view, 8> names{"reserve",   "arrive", "arrived", "failed",
                                                  "supersede", "leave",  "stay",    "vacate"};
  return names[static_cast<std::size_t>(step)];
}

CopyState next_state(CopyState state, CopyStep step) {
  switch (step) {
    case CopyStep::reserve:
      if (state == CopyState::absent) return CopyState::reserved;
      break;
    case CopyStep::arrive:
      if (state == CopyState::reserved) return CopyState::arriving;
      break;
    case CopyStep::arrived:
      if (state == CopyState::arriving) return CopyState::valid;
      break;
    case CopyStep::failed:
      if (state == CopyState::arriving) return CopyState::reserved;
      break;
    case CopyStep::supersede:
      if (state == CopyState::valid) return CopyState::reserved;
      break;
    case CopyStep::leave:
      if (state == CopyState::valid) return CopyState::leaving;
      break;
    case CopyStep::stay:
      if (state == CopyState::leaving) return CopyState::valid;
      break;
    case CopyStep::vacate:
      if (state == CopyState::valid || state == CopyState::leaving || state == CopyState::reserved) {
        return CopyState::absent;
      }
      break;
  }
  throw LogicError("residency: a copy that is " + std::string(name_of(state)) + " cannot take the step " +
                   std::string(name_of(step)));
}

void Residency::step(Tier tier, CopyStep step) {
  Copy& copy = at(tier);
  copy.state = next_state(copy.state, step);
}

bool Residency::has_bytes() const noexcept {
  return std::any_of(copies_.begin(), copies_.end(), [](const Copy& copy) { return copy.readable(); });
}

bool Residency::is_spare(Tier tier) const noexcept {
  const auto on_the_way = [&](Tier other) {
    return tier < info_.home ? tier < other && other <= info_.home : info_.home <= other && other < tier;
  };
  return blank || std::any_of(all_tiers.begin(), all_tiers.end(),
                              [&](Tier other) { return on_the_way(other) && at(other).readable(); });
}

bool Residency::in_flight() const noexcept {
  return being_read || std::any_of(copies_.begin(), copies_.end(), [](const Copy& copy) {
           return copy.state == CopyState::arriving || copy.outgoing > 0;
         });
}

bool Residency::pinned_elsewhere(Tier tier) const noexcept {
  return std::any_of(all_tiers.begin(), all_tiers.end(),
                     [&](Tier other) { return other != tier && at(other).pins > 0; });
}

bool Residency::changing_elsewhere(Tier tier) const noexcept {
  return std::any_of(all_tiers.begin(), all_tiers.end(),
                     [&](Tier other) { return other != tier && at(other).write_pins > 0; });
}

bool Residency::pinned() const noexcept {
  return std::any_of(copies_.begin(), copies_.end(), [](const Copy& copy) { return copy.pins > 0; });
}

}  // namespace terrace
