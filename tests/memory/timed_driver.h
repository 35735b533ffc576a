/// A driver of the policy machine for which transfers and computation take virtual time.
///
/// Transfers go over VirtualLinks. Computation is queued, and the program goes on at once. Fences: a copy of bytes on
/// the device, and a copy into room there, begin when the computation that used the bytes, or what was in that room
/// before, has ended. Vacates take no time; nor do fills, which a device does in the order of computation.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <utility>

#include "memory/policy.h"
#include "tests/memory/simulated_driver.h"
#include "tests/memory/virtual_links.h"

namespace terrace {

class TimedDriver : public SimulatedDriver {
 public:
  static constexpr VirtualTime never = VirtualLinks::never;

  TimedDriver(std::array<std::uint64_t, tier_count> capacity_bytes, std::size_t prefetch_depth,
              const VirtualLinks::Options& links)
      : SimulatedDriver(capacity_bytes, capacity_bytes[index_of(Tier::device)], prefetch_depth), links_(links) {}

  VirtualTime now() const { return now_; }
  /// When all that is queued has been computed.
  VirtualTime computed() const { return computed_; }
  const VirtualLinks& links() const { return links_; }

  /// Goes on, after every event, with what is done beside the program, and says when it has to do so next, or `never`
  /// where it waits for an event.
  void set_background(std::function<VirtualTime()> background) { background_ = std::move(background); }
  void go_on_in_background() { background_event_ = background_ ? background_() : never; }

  /// Queues computation with the chunk's bytes on the device.
  void compute(ChunkId chunk, VirtualTime time) {
    computed_ = std::max(computed_, now_) + time;
    used_until_[chunk] = computed_;
  }

  /// Carries out what takes no time, and starts what does. To be called after every event.
  void settle() {
    do {
      while (unreported_vacates() > 0) report_vacate();
      for (const Action& action : take_actions()) {
        if (action.what == Action::What::vacate && action.to == Tier::device) {
          free_rooms_.insert(used_until_[action.chunk]);
        }
      }
    } while (start_transfers());
    for (const Transfer& transfer : take_urgent()) links_.hurry(transfer);
    links_.begin_blocks(now_);
  }

  /// Lets time pass until the call is granted.
  void await(const Call& call) {
    settle();
    run_until([&] { return !call.waiting(); });
    require_granted(call);
  }
  template <class Stop>
  void run_until(Stop&& stop) {
    while (!stop()) go_on(never);
  }
  void run_until(VirtualTime time) {
    while (now_ < time) go_on(time);
  }

  static void require_granted(const Call& call) {
    if (!call.granted()) throw std::logic_error("the policy refuses what there is room for: " + call.error_text());
  }

 private:
  /// To the next event, or to `latest` if that is sooner.
  void go_on(VirtualTime latest) {
    const VirtualTime next = std::min({latest, links_.next_event(now_), background_event_});
    if (next == never) throw std::logic_error("the program waits, and nothing is under way");
    now_ = std::max(now_, next);
    for (const Transfer& transfer : links_.end_blocks(now_)) end(transfer);
    settle();
    go_on_in_background();
  }

  /// Whether there may be more to do at once.
  bool start_transfers() {
    for (std::size_t position = 0; position < in_flight().size(); ++position) {
      const Transfer transfer = in_flight()[position];
      if (!transfer.fill && links_.carries(transfer)) continue;
      VirtualTime device_ready{};
      if (transfer.from == Tier::device) device_ready = used_until_[transfer.chunk];
      if (transfer.to == Tier::device) device_ready = take_room();
      if (transfer.fill) {
        finish(position);
        return true;
      }
      links_.start(transfer, policy().chunk(transfer.chunk).info().bytes, device_ready);
    }
    return false;
  }
  /// The room on the device that was used longest ago; until when computation uses it.
  VirtualTime take_room() {
    return free_rooms_.empty() ? VirtualTime{} : free_rooms_.extract(free_rooms_.begin()).value();
  }
  void end(const Transfer& transfer) {
    if (transfer.to == Tier::device) used_until_[transfer.chunk] = VirtualTime{};
    const auto found = std::find_if(in_flight().begin(), in_flight().end(), [&](const Transfer& each) {
      return each.chunk == transfer.chunk && each.to == transfer.to;
    });
    finish(static_cast<std::size_t>(found - in_flight().begin()));
  }

  VirtualLinks links_;
  std::function<VirtualTime()> background_;
  VirtualTime background_event_ = never;
  VirtualTime now_{};
  VirtualTime computed_{};
  std::map<ChunkId, VirtualTime> used_until_;  ///< by computation, of copies on the device
  std::multiset<VirtualTime> free_rooms_;      ///< on the device, that were used: until when
};

}  // namespace terrace
