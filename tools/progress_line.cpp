#include "tools/progress_line.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/formatted.h"
#include "tools/text_table.h"

namespace terrace {
namespace {

constexpr int kStepCells = 10;
constexpr int kTierCells = 4;
constexpr double kSomeStall = 0.05;
constexpr double kMuchStall = 0.2;
constexpr double kFilling = 0.75;
constexpr double kFull = 0.95;

/// What goes first where there is no room, the last of these at the start.
enum class Importance : std::uint8_t {
  step,
  loss,
  stall,
  time_left,
  device,
  host,
  nvme,
  speed,
  cause,
  step_bar,
  tier_bars
};
constexpr std::array<Importance, tier_count> importance_of_tier{Importance::device, Importance::host, Importance::nvme};

struct Part {
  Importance importance;
  std::string before;  // what parts it from the one on its left
  std::string text;
  Style style = Style::plain;

  int width() const { return width_of(before) + width_of(text); }
};

std::string percent(double share) { return formatted("%.0f%%", 100 * share); }

Style style_of(double share, double middle, double high) {
  return share >= high ? Style::high : share >= middle ? Style::middle : Style::low;
}

std::vector<Part> parts_of(const RunState& state, bool bars, Looks looks) {
  const auto part_done =
      state.last_step > 0 ? static_cast<double>(state.step) / static_cast<double>(state.last_step) : 1;
  std::vector<Part> parts;
  const auto add = [&](Importance importance, const char* before, std::string text, Style style = Style::plain) {
    parts.push_back({importance, before, std::move(text), style});
  };
  add(Importance::step, "",
      formatted("step %lld/%lld", static_cast<long long>(state.step), static_cast<long long>(state.last_step)));
  if (bars) add(Importance::step_bar, " ", bar(part_done, kStepCells, looks), Style::accent);
  add(Importance::loss, "  ", formatted("loss %.4f", state.loss));
  add(Importance::speed, "  ", formatted("%.0f tokens/s", state.tokens_per_second));
  add(Importance::time_left, "  ", "ETA " + format_duration(state.seconds_left));
  for (const Tier tier : all_tiers) {
    const std::optional<double> used = state.used[index_of(tier)];
    if (!used) continue;
    const Importance importance = importance_of_tier[index_of(tier)];
    const Style style = style_of(*used, kFilling, kFull);
    add(importance, "  ", std::string(name_of(tier)));
    if (bars) add(Importance::tier_bars, " ", bar(*used, kTierCells, looks), style);
    add(importance, " ", percent(*used), style);
  }
  const Style style = style_of(state.stall_share, kSomeStall, kMuchStall);
  add(Importance::stall, "  ", "stall");
  add(Importance::stall, " ", percent(state.stall_share), style);
  if (state.main_stall) add(Importance::cause, " ", in_charset(name_of(*state.main_stall), looks), style);
  return parts;
}

int width_of_all(const std::vector<Part>& parts) {
  int columns = 0;
  for (const Part& part : parts) columns += part.width();
  return columns;
}

std::string joined(const std::vector<Part>& parts, Looks looks) {
  std::string line;
  for (const Part& part : parts) line += part.before + styled(part.text, part.style, looks);
  return line;
}

}  // namespace

std::string progress_line(const RunState& state, int columns, Looks looks) {
  std::vector<Part> parts = parts_of(state, true, looks);
  while (!parts.empty() && width_of_all(parts) > columns) {
    const Importance least = std::max_element(parts.begin(), parts.end(), [](const Part& one, const Part& other) {
                               return one.importance < other.importance;
                             })->importance;
    std::erase_if(parts, [&](const Part& part) { return part.importance == least; });
  }
  return joined(parts, looks);
}

std::string progress_text(const RunState& state) { return joined(parts_of(state, false, {.utf8 = true}), {}); }

}  // namespace terrace
