/// The hard budget of one tier: how many bytes may be used, and what uses them.
///
/// `try_reserve` never blocks and never overshoots: bytes are counted before they are used, and given
/// back after they are free. Sizes are bytes. Thread-safe and lock-free; a peak is a true maximum of the
/// value it belongs to.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "offload/tier.h"

namespace terrace {

class Budget {
 public:
  /// The setting with which a tier has so many bytes, where that is more than they are.
  using SettingFor = std::function<std::uint64_t(std::uint64_t bytes)>;

  Budget(Tier tier, std::uint64_t capacity_bytes, SettingFor setting_for = nullptr)
      : tier_(tier), capacity_(capacity_bytes), setting_for_(std::move(setting_for)) {}
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  Tier tier() const noexcept { return tier_; }
  std::uint64_t capacity() const noexcept { return capacity_; }
  std::uint64_t used() const noexcept { return total_.now.load(std::memory_order_relaxed); }
  std::uint64_t used(Kind kind) const noexcept { return kinds_[index_of(kind)].now.load(std::memory_order_relaxed); }
  std::uint64_t free() const noexcept { return capacity_ - used(); }
  std::uint64_t peak() const noexcept { return total_.peak.load(std::memory_order_relaxed); }
  std::uint64_t peak(Kind kind) const noexcept { return kinds_[index_of(kind)].peak.load(std::memory_order_relaxed); }

  /// Counts `bytes` as `kind` and returns true, or changes nothing where they do not fit.
  bool try_reserve(Kind kind, std::uint64_t bytes) noexcept;

  /// Gives back bytes reserved as `kind`.
  void release(Kind kind, std::uint64_t bytes) noexcept;

  /// Bytes reserved as `from` are of another kind from now on.
  void recount(Kind from, Kind to, std::uint64_t bytes) noexcept;

  /// The highest use since the last call, for figures by step.
  std::uint64_t take_step_peak() noexcept;

  /// The highest use since the last call, for samples.
  std::uint64_t take_sample_peak() noexcept;

  /// What each kind uses, at one moment: they sum to what is used then. Nothing where they change too fast to be seen.
  std::optional<std::array<std::uint64_t, kind_count>> used_by_kind() const noexcept;

  /// The most that kinds which are not chunks took since the last call.
  std::uint64_t take_program_peak() noexcept {
    const std::uint64_t now = program_now_.load(std::memory_order_relaxed);
    return program_peak_.load(std::memory_order_relaxed) == now ? now : reset_program_peak();  // most often the same
  }

  // What cannot leave: all that kinds which are not chunks use, and of chunks what is held here.
  /// From now on, until `let_go`, so many bytes of chunks cannot be given back: they rest here or are pinned.
  void hold(std::uint64_t bytes) noexcept {
    held_chunks_.fetch_add(bytes, std::memory_order_relaxed);
    add_held(bytes);
  }
  void let_go(std::uint64_t bytes) noexcept {
    held_chunks_.fetch_sub(bytes, std::memory_order_relaxed);
    held_.now.fetch_sub(bytes, std::memory_order_relaxed);
  }
  std::uint64_t held() const noexcept { return held_.now.load(std::memory_order_relaxed); }
  /// Of that what is chunks'.
  std::uint64_t held_chunk_bytes() const noexcept { return held_chunks_.load(std::memory_order_relaxed); }
  /// So much has to fit at one moment, whether it is taken or not.
  void need(std::uint64_t bytes) noexcept;
  /// The most that could not leave at one moment: with a smaller capacity something of it would have found no room.
  std::uint64_t needed() const noexcept { return held_.peak.load(std::memory_order_relaxed); }

  /// "device: 60MiB of 64MiB used: parameter 48MiB, other 12MiB", for error messages.
  std::string describe() const;
  /// The setting with which so many bytes fit.
  std::uint64_t setting_for(std::uint64_t bytes) const { return setting_for_ ? setting_for_(bytes) : bytes; }
  /// "raise device.memory to at least 72MiB", where so many bytes have to fit.
  std::string hint_to_hold(std::uint64_t bytes) const;

 private:
  struct Gauge {
    std::atomic<std::uint64_t> now{0};
    std::atomic<std::uint64_t> peak{0};
  };

  static void raise_to(std::atomic<std::uint64_t>& peak, std::uint64_t value) noexcept {
    std::uint64_t seen = peak.load(std::memory_order_relaxed);
    while (seen < value && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
    }
  }
  std::uint64_t reset_program_peak() noexcept;
  /// All counts but the total.
  void add(Kind kind, std::uint64_t bytes) noexcept;
  void subtract(Kind kind, std::uint64_t bytes) noexcept;
  void add_held(std::uint64_t bytes) noexcept {
    raise_to(held_.peak, held_.now.fetch_add(bytes, std::memory_order_relaxed) + bytes);
  }

  const Tier tier_;
  const std::uint64_t capacity_;
  const SettingFor setting_for_;
  Gauge total_;
  std::array<Gauge, kind_count> kinds_;
  std::atomic<std::uint64_t> step_peak_{0};
  std::atomic<std::uint64_t> sample_peak_{0};
  std::atomic<std::uint64_t> program_now_{0};
  std::atomic<std::uint64_t> program_peak_{0};
  std::atomic<std::uint64_t> held_chunks_{0};
  Gauge held_;  ///< with what the program uses
};

/// Part of a budget, held for as long as this object lives.
class Reservation {
 public:
  Reservation() noexcept = default;
  /// Throws OutOfMemory, saying who holds what, if the bytes do not fit now.
  Reservation(Budget& budget, Kind kind, std::uint64_t bytes);
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation();

  std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  void give_back() noexcept;

  Budget* budget_ = nullptr;
  Kind kind_ = Kind::other;
  std::uint64_t bytes_ = 0;
};

}  // namespace terrace
