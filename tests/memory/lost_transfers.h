/// Why the policy transfers more than the offline optimum: each transfer that it loses is put down to one eviction,
/// and that to one reason.
///
/// An eviction loses what the cheapest way to go on from what it leaves costs more than the cheapest from before it.
/// These losses add up to all that is lost. By the schedule, a copy that stays spares a fetch at its next use, and if
/// it is dirty a write-back when it is written anew. To give one up though another spares neither sooner is a fault: no
/// rule that knows the schedule should. Otherwise the one spares the fetch sooner and the other the write-back, and a
/// rule must weigh what no rule that is quick to follow weighs right each time: to do so best is hard (Beckmann et al.,
/// Writeback-Aware Caching, 2020). Such losses are of one of three reasons.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "tests/memory/eviction_replay.h"
#include "tests/memory/offline_optimum.h"

namespace terrace {

enum class LossReason : std::uint8_t { clean_for_dirty, dirty_for_clean, dirty_for_dirty, fault };
inline constexpr std::size_t loss_reason_count = 4;

inline std::string_view name_of(LossReason reason) {
  constexpr std::array<std::string_view, loss_reason_count> names{
      "a clean copy was given up for a dirty one that is used later",
      "a dirty copy was given up for a clean one that is used sooner",
      "of two dirty copies the one used sooner was given up for the one written sooner, or the other way round",
      "a copy was given up though another spares nothing sooner"};
  return names[static_cast<std::size_t>(reason)];
}

/// What a policy that does nothing ahead of need lost, in an optimum's eyes.
class LostTransfers {
 public:
  LostTransfers(const EvictionSetting& setting, const EvictionReplay& replay, OfflineOptimum& optimum)
      : pass_(setting.pass), optimum_(optimum) {
    const auto& events = replay.events();
    for (std::size_t at = 0; at < events.size(); ++at) {
      const State before = OfflineOptimum::state_of(events[at].before);
      const State after = OfflineOptimum::state_of(at + 1 < events.size() ? events[at + 1].before : replay.end());
      const std::size_t spent = events[at].transfers + optimum.fewest_from(at + 1, after);
      const std::size_t lost = spent - optimum.fewest_from(at, before);
      total_ += lost;
      if (lost > 0) by_reason_[static_cast<std::size_t>(reason_for(at, before, after))] += lost;
    }
  }

  std::size_t total() const { return total_; }
  std::size_t by(LossReason reason) const { return by_reason_[static_cast<std::size_t>(reason)]; }

 private:
  using State = OfflineOptimum::State;
  static constexpr std::size_t never = std::numeric_limits<std::size_t>::max();

  /// How far away it is that a copy spares a transfer.
  struct Worth {
    std::size_t use = never;
    std::size_t write_back = never;

    bool is_no_more_than(const Worth& other) const { return use >= other.use && write_back >= other.write_back; }
  };

  LossReason reason_for(std::size_t at, State before, State after) const {
    const std::optional<std::size_t> victim = victim_of(at, before, after);
    if (!victim) return LossReason::fault;
    std::optional<LossReason> reason;
    optimum_.for_each_way(at, before, [&](State next, std::size_t transfers, std::optional<std::size_t> better) {
      if (reason == LossReason::fault ||
          transfers + optimum_.fewest_from(at + 1, next) != optimum_.fewest_from(at, before)) {
        return;
      }
      const bool is_fault = worth(*better, at, before).is_no_more_than(worth(*victim, at, before));
      reason = is_fault                                     ? LossReason::fault
               : !OfflineOptimum::is_dirty(before, *victim) ? LossReason::clean_for_dirty
               : !OfflineOptimum::is_dirty(before, *better) ? LossReason::dirty_for_clean
                                                            : LossReason::dirty_for_dirty;
    });
    return reason.value();
  }

  std::optional<std::size_t> victim_of(std::size_t at, State before, State after) const {
    std::optional<std::size_t> victim;
    optimum_.for_each_way(at, before, [&](State next, std::size_t, std::optional<std::size_t> given_up) {
      victim = next == after ? given_up : victim;
    });
    return victim;
  }

  /// As the schedule of the device tells it, in which nothing is said of what is done at home.
  Worth worth(std::size_t chunk, std::size_t at, State before) const {
    Worth worth;
    for (std::size_t away = pass_.size(); away > 0; --away) {
      const OfflineEvent& event = pass_[(at + away) % pass_.size()];
      if (event.chunk != chunk || event.what != OfflineEvent::What::use) continue;
      worth.use = away;
      if (event.writes && OfflineOptimum::is_dirty(before, chunk)) worth.write_back = away;
    }
    return worth;
  }

  const OfflinePass& pass_;
  OfflineOptimum& optimum_;
  std::size_t total_ = 0;
  std::array<std::size_t, loss_reason_count> by_reason_{};
};

}  // namespace terrace
