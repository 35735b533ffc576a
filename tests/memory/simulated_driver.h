/// A driver of the policy machine that moves no bytes.
///
/// It carries out what the policy asks for when it is told to, and knows of every copy which version of the chunk's
/// contents it would hold: a transfer copies it, a write makes a new one. So it can tell whether every granted access
/// sees the newest contents, and whether anything is read, dropped or overwritten that must not be.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "memory/policy.h"

namespace terrace {

/// Something that the policy had done.
struct Action {
  enum class What : std::uint8_t { move, fill, vacate };

  What what = What::move;
  ChunkId chunk = 0;
  Tier from = Tier::host;
  Tier to = Tier::host;

  bool operator==(const Action&) const = default;
};

inline Action moves(ChunkId chunk, Tier from, Tier to) { return {Action::What::move, chunk, from, to}; }
inline Action fills(ChunkId chunk, Tier tier) { return {Action::What::fill, chunk, tier, tier}; }
inline Action vacates(ChunkId chunk, Tier tier) { return {Action::What::vacate, chunk, tier, tier}; }

inline std::ostream& operator<<(std::ostream& out, const Action& action) {
  switch (action.what) {
    case Action::What::move:
      return out << "move " << action.chunk << " " << name_of(action.from) << "->" << name_of(action.to);
    case Action::What::fill:
      return out << "fill " << action.chunk << " " << name_of(action.to);
    case Action::What::vacate:
      break;
  }
  return out << "vacate " << action.chunk << " " << name_of(action.to);
}

class SimulatedDriver {
 public:
  static constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();

  /// Who asked for something.
  struct Call {
    std::vector<ChunkAccess> accesses;
    Request request;
    bool seen_granted = false;

    bool waiting() const { return request.verdict == Request::Verdict::waiting; }
    bool granted() const { return request.verdict == Request::Verdict::granted; }
    bool refused() const { return request.verdict == Request::Verdict::refused; }

    /// The whole text of the error it was refused with; empty if it was not.
    std::string error_text() const {
      try {
        if (request.error) std::rethrow_exception(request.error);
      } catch (const std::exception& error) {
        return error.what();
      }
      return "";
    }
    template <class Type>
    bool refused_with() const {
      try {
        if (request.error) std::rethrow_exception(request.error);
      } catch (const Type&) {
        return refused();
      } catch (...) {
      }
      return false;
    }
  };

  SimulatedDriver(std::array<std::uint64_t, tier_count> capacity_bytes, std::uint64_t device_chunk_limit = unlimited,
                  std::size_t prefetch_depth = 0)
      : device_(Tier::device, capacity_bytes[0]),
        host_(Tier::host, capacity_bytes[1]),
        nvme_(Tier::nvme, capacity_bytes[2]),
        policy_({&device_, &host_, &nvme_}, device_chunk_limit, prefetch_depth) {}

  Policy& policy() { return policy_; }
  Budget& budget(Tier tier) { return tier == Tier::device ? device_ : tier == Tier::host ? host_ : nvme_; }
  CopyState state(ChunkId chunk, Tier tier) const { return policy_.chunk(chunk).at(tier).state; }

  // --- events ---

  ChunkId add_chunk(const ChunkInfo& info) {
    const ChunkId id = policy_.add_chunk(info);
    contents_.emplace_back();
    after_event();
    return id;
  }

  Call& acquire(std::vector<ChunkAccess> accesses, bool in_schedule = true) {
    Call& call = new_call();
    call.accesses = std::move(accesses);
    call.request.in_schedule = in_schedule;
    call.request.accesses = call.accesses;
    return submit(call);
  }

  Call& acquire_patiently(std::vector<ChunkAccess> accesses) {
    Call& call = new_call();
    call.accesses = std::move(accesses);
    call.request.patient = true;
    call.request.accesses = call.accesses;
    return submit(call);
  }

  Call& allocate(std::uint64_t bytes, Kind kind = Kind::other) {
    Call& call = new_call();
    call.request.program_bytes = bytes;
    call.request.program_kind = kind;
    return submit(call);
  }

  /// Ends a granted call.
  void release(Call& call) {
    require(call.granted(), "only what was granted can be released");
    if (call.accesses.empty()) {
      device_.release(call.request.program_kind, call.request.program_bytes);
      forget(call);
      return;
    }
    for (const ChunkAccess& access : call.accesses) {
      Contents& contents = contents_.at(access.chunk);
      --contents.pins[index_of(access.tier)];
      if (access.mode == Access::write) {
        --contents.write_pins[index_of(access.tier)];
        contents.versions[index_of(access.tier)] = contents.newest = ++last_version_;
      }
    }
    const std::vector<ChunkAccess> accesses = call.accesses;
    forget(call);
    policy_.release(accesses);
    after_event();
  }

  void discard(ChunkId chunk) {
    contents_.at(chunk).dead = true;
    policy_.discard(chunk);
    after_event();
  }

  void remove(ChunkId chunk) {
    contents_.at(chunk).dead = true;
    policy_.remove(chunk);
    after_event();
  }

  void step_mark() {
    policy_.step_mark();
    after_event();
  }
  void begin_pass(ScheduleBook::Key key, ScheduleBook::End end = ScheduleBook::End::step) {
    policy_.begin_pass(key, end);
    after_event();
  }
  void announce(std::vector<ChunkId> chunks) {
    policy_.announce(std::move(chunks));
    after_event();
  }
  void set_updates_awaited(bool awaited) {
    policy_.set_updates_awaited(awaited);
    after_event();
  }
  void set_update_queued(ChunkId chunk, bool queued) {
    policy_.set_update_queued({&chunk, 1}, queued);
    after_event();
  }
  void update_done(ChunkId gradient) {
    policy_.update_done(gradient);
    after_event();
  }
  void set_read_on_arrival(ChunkId chunk, bool wanted) {
    policy_.set_read_on_arrival(chunk, wanted);
    after_event();
  }
  /// The transfers for which somebody came to wait after they were started, since the last call.
  std::vector<Transfer> take_urgent() { return std::exchange(urgent_, {}); }

  // --- carrying out ---

  bool writes_back(const Transfer& transfer) const {
    return !transfer.fill && transfer.to == policy_.chunk(transfer.chunk).info().home;
  }
  /// How many write-backs of the chunk have failed in a row.
  std::uint32_t failed_write_backs(ChunkId chunk) const { return contents_.at(chunk).failed_write_backs; }

  const std::vector<Transfer>& in_flight() const { return in_flight_; }
  std::size_t unreported_vacates() const { return vacated_.size(); }
  /// Chunks that are being read on the host.
  const std::vector<ChunkId>& being_read() const { return being_read_; }
  bool idle() const { return in_flight_.empty() && vacated_.empty() && being_read_.empty() && !policy_.has_readings(); }
  /// Whether readers begin what they are given; they do at first.
  void set_readers_begin(bool begin) {
    readers_begin_ = begin;
    after_event();
  }

  /// Reports a transfer in flight as done.
  void finish(std::size_t position = 0) {
    const Transfer transfer = take_in_flight(position);
    Contents& contents = contents_.at(transfer.chunk);
    const std::uint64_t copied = std::exchange(contents.copied[index_of(transfer.to)], std::nullopt).value();
    require(transfer.fill || contents.versions[index_of(transfer.from)] == copied,
            "the source of a transfer keeps its contents meanwhile");
    contents.versions[index_of(transfer.to)] = copied;
    if (transfer.to == policy_.chunk(transfer.chunk).info().home) contents.failed_write_backs = 0;
    policy_.transfer_done(transfer);
    after_event();
  }

  void fail(std::size_t position = 0, std::exception_ptr error = nullptr) {
    const Transfer transfer = take_in_flight(position);
    contents_.at(transfer.chunk).copied[index_of(transfer.to)].reset();
    if (writes_back(transfer)) ++contents_.at(transfer.chunk).failed_write_backs;
    policy_.transfer_failed(transfer, error ? error : std::make_exception_ptr(IoError("the drive is gone")));
    after_event();
  }

  /// Reports a chunk that was being read as read.
  void end_reading(std::size_t position = 0) {
    const ChunkId chunk = being_read_.at(position);
    being_read_.erase(being_read_.begin() + static_cast<std::ptrdiff_t>(position));
    policy_.reading_done(chunk);
    after_event();
  }

  /// Reports a carried out vacate.
  void report_vacate(std::size_t position = 0) {
    const Vacate vacate = vacated_.at(position);
    vacated_.erase(vacated_.begin() + static_cast<std::ptrdiff_t>(position));
    policy_.vacated(vacate);
    after_event();
  }

  /// Carries out and reports everything, oldest first, until nothing is under way.
  void run() {
    constexpr int endless = 100'000;
    set_readers_begin(true);
    for (int events = 0; !idle(); ++events) {
      require(events < endless, "what is under way ends");
      if (!vacated_.empty()) {
        report_vacate();
      } else if (!being_read_.empty()) {
        end_reading();
      } else {
        finish();
      }
    }
  }

  // --- conveniences ---

  /// Acquires, carries everything out, and releases; the call must be granted.
  void use(ChunkId chunk, Tier tier, Access mode) {
    Call& call = acquire({{chunk, tier, mode}});
    run();
    require(call.granted(), "this access must be granted");
    release(call);
  }
  void read(ChunkId chunk, Tier tier) { use(chunk, tier, Access::read); }
  void write(ChunkId chunk, Tier tier) { use(chunk, tier, Access::write); }

  /// The actions since the last call.
  std::vector<Action> take_actions() { return std::exchange(actions_, {}); }

  std::deque<std::unique_ptr<Call>>& calls() { return calls_; }

  /// Whether `call` is still known: refused ones are kept until `forget`.
  void forget(Call& call) {
    for (auto entry = calls_.begin(); entry != calls_.end(); ++entry) {
      if (entry->get() == &call) {
        calls_.erase(entry);
        return;
      }
    }
    throw std::logic_error("a call that nobody made");
  }

 private:
  /// What the copies of one chunk hold. Version 0 is zeros: never written.
  struct Contents {
    std::array<std::optional<std::uint64_t>, tier_count> versions;  ///< of each copy
    std::array<std::optional<std::uint64_t>, tier_count> copied;    ///< by the transfer under way to each copy
    std::array<std::uint32_t, tier_count> pins{};                   ///< granted
    std::array<std::uint32_t, tier_count> write_pins{};
    std::uint64_t newest = 0;
    std::uint32_t failed_write_backs = 0;  ///< in a row
    bool dead = false;                     ///< discarded, and not written since: may read as anything
  };

  static void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("broken promise: ") + what);
  }

  Call& new_call() { return *calls_.emplace_back(std::make_unique<Call>()); }

  Call& submit(Call& call) {
    policy_.submit(call.request);
    after_event();
    return call;
  }

  Transfer take_in_flight(std::size_t position) {
    const Transfer transfer = in_flight_.at(position);
    in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(position));
    return transfer;
  }

  void after_event() {
    see_grants();
    take_vacates();
    take_transfers();
    take_readings();
    check();
  }

  void see_grants() {
    for (const auto& call : calls_) {
      if (!call->granted() || std::exchange(call->seen_granted, true)) continue;
      for (const ChunkAccess& access : call->accesses) {
        check_current(access);
        Contents& contents = contents_.at(access.chunk);
        ++contents.pins[index_of(access.tier)];
        contents.write_pins[index_of(access.tier)] += access.mode == Access::write ? 1 : 0;
      }
      for (const ChunkAccess& access : call->accesses) {
        if (access.mode == Access::write) {
          Contents& contents = contents_.at(access.chunk);
          contents.versions[index_of(access.tier)] = contents.newest = ++last_version_;
          contents.dead = false;
        }
      }
    }
  }

  void take_vacates() {
    while (const auto vacate = policy_.next_vacate()) {
      Contents& contents = contents_.at(vacate->chunk);
      require(contents.pins[index_of(vacate->tier)] == 0, "no room is given up under a pin");
      contents.versions[index_of(vacate->tier)].reset();
      actions_.push_back(vacates(vacate->chunk, vacate->tier));
      vacated_.push_back(*vacate);
    }
  }

  void take_transfers() {
    while (const auto transfer = policy_.next_transfer()) {
      Contents& contents = contents_.at(transfer->chunk);
      require(contents.pins[index_of(transfer->to)] == 0, "nothing is overwritten under a pin");
      std::uint64_t copied = 0;
      if (transfer->fill) {
        require(contents.dead || contents.newest == 0, "only what was never written, or discarded, is filled");
        actions_.push_back(fills(transfer->chunk, transfer->to));
      } else {
        const auto& source = contents.versions[index_of(transfer->from)];
        require(source.has_value(), "a transfer reads a copy that is there");
        require(contents.dead || *source == contents.newest, "a transfer reads the newest contents");
        require(contents.write_pins[index_of(transfer->from)] == 0, "nothing is copied while it is written");
        copied = *source;
        actions_.push_back(moves(transfer->chunk, transfer->from, transfer->to));
      }
      contents.copied[index_of(transfer->to)] = copied;
      in_flight_.push_back(*transfer);
    }
    while (const auto urgent = policy_.next_urgent()) {
      urgent_.push_back(*urgent);
    }
  }

  void take_readings() {
    while (const auto chunk = readers_begin_ ? policy_.next_reading() : std::nullopt) {
      require(std::count(being_read_.begin(), being_read_.end(), *chunk) == 0, "nothing is read twice at a time");
      being_read_.push_back(*chunk);
    }
  }

  void check() const {
    policy_.check_invariants();
    for (const ChunkId chunk : being_read_) {
      const Contents& contents = contents_.at(chunk);
      const auto& version = contents.versions[index_of(Tier::host)];
      require(version.has_value(), "what is being read on the host is there");
      require(contents.dead || *version == contents.newest, "and has the newest contents");
    }
    const auto patient = std::count_if(calls_.begin(), calls_.end(),
                                       [](const auto& call) { return call->request.patient && call->waiting(); });
    require(policy_.waiting() <= static_cast<std::size_t>(patient) || !idle(),
            "who waits and is not patient waits for something under way");
    for (const auto& call : calls_) {
      if (!call->seen_granted) continue;
      for (const ChunkAccess& access : call->accesses) check_current(access);
    }
  }

  void check_current(const ChunkAccess& access) const {
    const Contents& contents = contents_.at(access.chunk);
    const auto& version = contents.versions[index_of(access.tier)];
    require(version.has_value(), "a granted access has its bytes");
    require(contents.dead || *version == contents.newest, "a granted access sees the newest contents");
  }

  Budget device_;
  Budget host_;
  Budget nvme_;
  std::deque<std::unique_ptr<Call>> calls_;
  Policy policy_;
  std::vector<Transfer> in_flight_;
  std::vector<Transfer> urgent_;
  std::vector<Vacate> vacated_;
  std::vector<ChunkId> being_read_;
  bool readers_begin_ = true;
  std::vector<Action> actions_;
  std::vector<Contents> contents_;
  std::uint64_t last_version_ = 0;
};

}  // namespace terrace
