#include "memory/activation_plan.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

namespace terrace {
namespace {

constexpr double unlimited = std::numeric_limits<double>::infinity();
/// Pairs of more blocks than that take too long to try.
constexpr std::size_t most_for_pairs = 128;
/// Changes that gain less are noise.
constexpr double least_gain = 1e-6;

class Player {
 public:
  Player(const PassProfile& pass, const Recomputed& recomputed)
      : pass_(pass), recomputed_(recomputed), place_(pass.blocks.size()) {}

  PlayedPass play() {
    PlayedPass played;
    played.leaving_bytes = choose_leaving();
    leaving_ = played.leaving_bytes;
    played.forward_seconds = forward() ? now_ : unlimited;
    played.seconds = played.forward_seconds < unlimited && backward() ? now_ : unlimited;
    return played;
  }

 private:
  struct Place {
    bool on_device = true;
    double there_at = 0;  ///< what has left and comes back
  };
  struct Leaving {
    std::size_t block;
    double ends;
  };

  std::uint64_t held(std::size_t block) const {
    const BlockProfile& profile = pass_.blocks[block];
    return profile.input_bytes + (recomputed_[block] ? 0 : profile.saved_bytes);
  }
  std::uint64_t while_running(std::size_t block) const {
    return pass_.blocks[block].input_bytes + pass_.blocks[block].saved_bytes;
  }

  /// Of the first blocks, as much as there is no room for.
  std::vector<std::uint64_t> choose_leaving() const {
    std::uint64_t most = 0;
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < pass_.blocks.size(); ++i) {
      most = std::max(most, all + while_running(i));
      all += held(i);
    }
    std::uint64_t left = most - std::min(most, pass_.room_bytes);
    std::vector<std::uint64_t> leaving(pass_.blocks.size());
    for (std::size_t i = 0; i < leaving.size(); ++i) {
      leaving[i] = std::min(left, held(i));
      left -= leaving[i];
    }
    return leaving;
  }

  /// Waits until what leaves has left, the first first, for there to be room.
  bool make_room(std::uint64_t bytes) {
    while (used_ + bytes > pass_.room_bytes) {
      if (out_.empty()) {
        return false;
      }
      now_ = std::max(now_, out_.front().ends);
      used_ -= leaving_[out_.front().block];
      place_[out_.front().block].on_device = false;
      out_.pop_front();
    }
    return true;
  }

  bool forward() {
    for (std::size_t i = 0; i < pass_.blocks.size(); ++i) {
      if (!make_room(while_running(i))) {
        return false;
      }
      now_ += pass_.blocks[i].forward_seconds;
      used_ += held(i);
      if (leaving_[i] > 0) {
        out_free_ = std::max(out_free_, now_) + static_cast<double>(leaving_[i]) / pass_.out_bytes_per_second;
        out_.push_back({i, out_free_});
      }
    }
    return true;
  }

  /// Has what comes next brought, as far as there is room beside what the running block needs.
  void fetch(std::uint64_t needed) {
    for (; next_ > 0; --next_) {
      Place& place = place_[next_ - 1];
      const std::uint64_t bytes = leaving_[next_ - 1];
      if (place.on_device) {
        continue;
      }
      if (used_ + bytes + needed > pass_.room_bytes) {
        return;
      }
      in_free_ = std::max(in_free_, now_) + static_cast<double>(bytes) / pass_.in_bytes_per_second;
      place = {.on_device = true, .there_at = in_free_};
      used_ += bytes;
    }
  }

  bool backward() {
    next_ = pass_.blocks.size();
    for (std::size_t i = pass_.blocks.size(); i-- > 0;) {
      std::erase_if(out_, [&](const Leaving& each) { return each.block == i; });
      const std::uint64_t again = recomputed_[i] ? pass_.blocks[i].saved_bytes : 0;
      if (!place_[i].on_device && !make_room(leaving_[i] + again)) {
        return false;
      }
      fetch(again);
      if (!place_[i].on_device) {
        return false;
      }
      now_ = std::max(now_, place_[i].there_at);
      now_ += pass_.blocks[i].backward_seconds + (recomputed_[i] ? pass_.blocks[i].forward_seconds : 0);
      used_ -= held(i);
    }
    return true;
  }

  const PassProfile& pass_;
  const Recomputed& recomputed_;
  std::vector<std::uint64_t> leaving_;
  std::vector<Place> place_;
  std::deque<Leaving> out_;  ///< whose room is free from then on
  std::uint64_t used_ = 0;
  std::size_t next_ = 0;  ///< all from here on are on the device, or on their way
  double now_ = 0;
  double out_free_ = 0;
  double in_free_ = 0;
};

/// Plans that are compared by their passes. Only blocks that may run again ever do.
class Search {
 public:
  explicit Search(const PassProfile& pass) : pass_(pass), best_(pass.blocks.size(), false), cost_(cost_of(best_)) {
    for (std::size_t i = 0; i < pass.blocks.size(); ++i) {
      if (pass.blocks[i].may_run_again) {
        free_.push_back(i);
      }
    }
  }

  Recomputed run() {
    start();
    while (change_one() || (free_.size() <= most_for_pairs && change_two())) {
    }
    return best_;
  }

 private:
  struct Cost {
    double seconds = 0;
    std::uint64_t moved_bytes = 0;
    std::size_t recomputed = 0;

    bool is_below(const Cost& other) const {
      if (seconds < other.seconds * (1 - least_gain)) return true;
      if (seconds > other.seconds) return false;
      return moved_bytes != other.moved_bytes ? moved_bytes < other.moved_bytes : recomputed < other.recomputed;
    }
  };

  Cost cost_of(const Recomputed& recomputed) const {
    const PlayedPass played = terrace::play(pass_, recomputed);
    return {played.seconds, played.all_leaving_bytes(),
            static_cast<std::size_t>(std::count(recomputed.begin(), recomputed.end(), true))};
  }

  bool consider(Recomputed recomputed) {
    const Cost cost = cost_of(recomputed);
    if (!cost.is_below(cost_)) {
      return false;
    }
    best_ = std::move(recomputed);
    cost_ = cost;
    return true;
  }

  /// The first blocks, or the last, and every second one, every third.
  void start() {
    const std::size_t count = free_.size();
    for (std::size_t some = 1; some <= count; ++some) {
      Recomputed first(best_.size());
      Recomputed last(best_.size());
      Recomputed spread(best_.size());
      for (std::size_t i = 0; i < count; ++i) {
        first[free_[i]] = i < some;
        last[free_[i]] = i + some >= count;
        spread[free_[i]] = i % some == 0;
      }
      consider(std::move(first));
      consider(std::move(last));
      consider(std::move(spread));
    }
  }

  bool change_one() {
    bool changed = false;
    for (const std::size_t i : free_) {
      Recomputed other = best_;
      other[i] = !other[i];
      changed = consider(std::move(other)) || changed;
    }
    return changed;
  }

  bool change_two() {
    bool changed = false;
    for (auto i = free_.begin(); i != free_.end(); ++i) {
      for (auto j = std::next(i); j != free_.end(); ++j) {
        Recomputed other = best_;
        other[*i] = !other[*i];
        other[*j] = !other[*j];
        changed = consider(std::move(other)) || changed;
      }
    }
    return changed;
  }

  const PassProfile& pass_;
  std::vector<std::size_t> free_;  ///< the blocks that may run again
  Recomputed best_;
  Cost cost_;
};

/// The least rate that is fast enough for `seconds_at(rate) <= seconds`, which falls with the rate.
template <class SecondsAt>
double least_rate(double seconds, SecondsAt&& seconds_at) {
  double slow = 1;
  double fast = 1e13;
  if (seconds_at(fast) * (1 + least_gain) >= seconds) {
    return unlimited;
  }
  for (int halvings = 0; halvings < 60 && fast > slow * 1.001; ++halvings) {
    const double middle = std::sqrt(slow * fast);
    (seconds_at(middle) > seconds ? slow : fast) = middle;
  }
  return fast;
}

}  // namespace

std::uint64_t PlayedPass::all_leaving_bytes() const {
  return std::accumulate(leaving_bytes.begin(), leaving_bytes.end(), std::uint64_t{0});
}

PlayedPass play(const PassProfile& pass, const Recomputed& recomputed) { return Player(pass, recomputed).play(); }

Recomputed plan_recompute(const PassProfile& pass) { return Search(pass).run(); }

void set_rates_as_seen(PassProfile& pass, double forward_seconds, double backward_seconds) {
  const Recomputed none(pass.blocks.size(), false);
  pass.out_bytes_per_second = unlimited;
  pass.in_bytes_per_second = unlimited;
  pass.out_bytes_per_second = least_rate(forward_seconds, [&](double rate) {
    PassProfile tried = pass;
    tried.out_bytes_per_second = rate;
    return play(tried, none).forward_seconds;
  });
  pass.in_bytes_per_second = least_rate(forward_seconds + backward_seconds, [&](double rate) {
    PassProfile tried = pass;
    tried.in_bytes_per_second = rate;
    return play(tried, none).seconds;
  });
}

}  // namespace terrace
