/// The links between the tiers, in virtual time.
///
/// A transfer is a run of blocks. Each link between device and host carries one block at a time. The drive serves the
/// blocks of reads and of writes in the order in which they came to it, one after the other, answers each some time
/// after that, and holds so many of each at once as its queue is deep: a block waits for all that were there before,
/// whatever they are for. Between device
/// and NVMe a block crosses two links, and takes one of few staging blocks from the beginning of the first to the end
/// of the second. A link that is free takes the next block of its most urgent transfer, of those the oldest.
///
/// Not modelled: what it costs to begin a block, checksums, rates that vary, and memory that all links share.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <vector>

#include "memory/chunk.h"

namespace terrace {

/// Since the beginning of time. Whole nanoseconds, so that it is the same on every machine.
using VirtualTime = std::chrono::nanoseconds;

inline VirtualTime virtual_seconds(double seconds) {
  return std::chrono::duration_cast<VirtualTime>(std::chrono::duration<double>(seconds));
}
inline double seconds_of(VirtualTime time) { return std::chrono::duration<double>(time).count(); }

class VirtualLinks {
 public:
  static constexpr std::uint64_t block_bytes = 128 * 1024;
  static constexpr VirtualTime never = VirtualTime::max();

  struct Options {
    double link_bytes_per_second = 0;   ///< between device and host, each way
    double drive_bytes_per_second = 0;  ///< reads and writes together
    std::size_t drive_depth = 64;       ///< blocks with the drive at once, each way
    double drive_latency_seconds = 0;   ///< from when a block was served to its answer
    std::size_t staging_blocks_each_way = 16;
  };

  explicit VirtualLinks(const Options& options)
      : options_(options),
        link_block_time_(virtual_seconds(block_bytes / options.link_bytes_per_second)),
        drive_block_time_(virtual_seconds(block_bytes / options.drive_bytes_per_second)) {}

  /// Its blocks cross the link at the device from `device_ready` on.
  void start(const Transfer& transfer, std::uint64_t bytes, VirtualTime device_ready) {
    Movement& movement = movements_.emplace_back();
    movement.transfer = transfer;
    movement.blocks = bytes / block_bytes;
    movement.device_ready = device_ready;
    for (const Link link : route_of(transfer)) movement.legs.push_back({.link = link});
  }
  bool carries(const Transfer& transfer) const {
    return std::any_of(movements_.begin(), movements_.end(),
                       [&](const Movement& each) { return is_same(each.transfer, transfer); });
  }
  /// Somebody waits for it now.
  void hurry(const Transfer& transfer) {
    for (Movement& each : movements_) {
      if (is_same(each.transfer, transfer)) each.transfer.priority = TransferPriority::demand;
    }
  }

  /// Free links take blocks.
  void begin_blocks(VirtualTime now) {
    for (const Link link : all_links) {
      while (on_link(link).size() < (is_of_drive(link) ? options_.drive_depth : 1) && begin_block(link, now)) {
      }
    }
  }
  /// The next time at which a block has crossed its link, or one may begin.
  VirtualTime next_event(VirtualTime now) const {
    VirtualTime next = never;
    for (const auto& blocks : on_links_) {
      if (!blocks.empty()) next = std::min(next, blocks.front().end);
    }
    for (const Movement& each : movements_) {
      if (each.device_ready > now) next = std::min(next, each.device_ready);
    }
    return next;
  }
  /// The transfers whose last block has crossed by now.
  std::vector<Transfer> end_blocks(VirtualTime now) {
    for (auto& blocks : on_links_) {
      for (; !blocks.empty() && blocks.front().end <= now; blocks.pop_front()) end_block(blocks.front());
    }
    std::vector<Transfer> ended;
    for (const Movement& each : movements_) {
      if (each.has_ended()) ended.push_back(each.transfer);
    }
    movements_.remove_if([](const Movement& each) { return each.has_ended(); });
    return ended;
  }

  /// What has crossed the link so far.
  std::uint64_t carried_bytes(Link link) const { return carried_bytes_[index_of(link)]; }

 private:
  /// A transfer's way over one link.
  struct Leg {
    Link link = Link::host_to_device;
    std::size_t begun = 0;  ///< blocks
    std::size_t ended = 0;
  };
  struct Movement {
    Transfer transfer;
    std::size_t blocks = 0;
    VirtualTime device_ready{};
    std::vector<Leg> legs;

    bool has_ended() const { return legs.back().ended == blocks; }
    bool is_staged() const { return legs.size() > 1; }
  };
  struct Block {
    Movement* movement = nullptr;
    std::size_t leg = 0;
    VirtualTime end{};
  };

  static bool is_same(const Transfer& one, const Transfer& other) {
    return one.chunk == other.chunk && one.to == other.to;
  }
  static bool is_of_drive(Link link) { return link == Link::nvme_to_host || link == Link::host_to_nvme; }

  static std::vector<Link> route_of(const Transfer& transfer) {
    std::vector<Link> route;
    if (transfer.from == Tier::nvme) route.push_back(Link::nvme_to_host);
    if (transfer.from == Tier::device) route.push_back(Link::device_to_host);
    if (transfer.to == Tier::device) route.push_back(Link::host_to_device);
    if (transfer.to == Tier::nvme) route.push_back(Link::host_to_nvme);
    return route;
  }

  std::deque<Block>& on_link(Link link) { return on_links_[index_of(link)]; }
  std::size_t& staged(const Movement& movement) { return staged_[movement.transfer.to == Tier::device ? 0 : 1]; }

  bool can_begin(const Movement& movement, std::size_t leg, VirtualTime now) {
    const std::size_t next = movement.legs[leg].begun;
    if (next == movement.blocks || (leg > 0 && next == movement.legs[leg - 1].ended)) return false;
    if (!is_of_drive(movement.legs[leg].link) && movement.device_ready > now) return false;
    return leg > 0 || !movement.is_staged() || staged(movement) < options_.staging_blocks_each_way;
  }

  /// False where no transfer has a block for the link.
  bool begin_block(Link link, VirtualTime now) {
    Block best;
    for (Movement& each : movements_) {
      for (std::size_t leg = 0; leg < each.legs.size(); ++leg) {
        const bool is_better = best.movement == nullptr || each.transfer.priority < best.movement->transfer.priority;
        if (each.legs[leg].link == link && is_better && can_begin(each, leg, now)) best = {&each, leg};
      }
    }
    if (best.movement == nullptr) return false;
    if (best.leg == 0 && best.movement->is_staged()) ++staged(*best.movement);
    ++best.movement->legs[best.leg].begun;
    if (is_of_drive(link)) {
      drive_free_ = std::max(now, drive_free_) + drive_block_time_;
      best.end = drive_free_ + virtual_seconds(options_.drive_latency_seconds);
    } else {
      best.end = now + link_block_time_;
    }
    on_link(link).push_back(best);
    return true;
  }

  void end_block(const Block& block) {
    Leg& leg = block.movement->legs[block.leg];
    ++leg.ended;
    carried_bytes_[index_of(leg.link)] += block_bytes;
    if (block.leg > 0) --staged(*block.movement);
  }

  const Options options_;
  const VirtualTime link_block_time_;
  const VirtualTime drive_block_time_;
  std::list<Movement> movements_;  ///< oldest first
  std::array<std::deque<Block>, link_count> on_links_;
  std::array<std::size_t, 2> staged_{};  ///< blocks on their way to the device, and from it
  VirtualTime drive_free_{};
  std::array<std::uint64_t, link_count> carried_bytes_{};
};

}  // namespace terrace
