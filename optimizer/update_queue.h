/// The optimizer step over managed chunks, on the host, queued behind the program.
///
/// A job is a copy of all that an update needs, taken at `step()`: later changes of options cannot reach it. For each
/// set of chunks it brings gradient, parameter, master and moments to the host, updates every segment that has a
/// gradient, and leaves the rest to residency. Where clipping is on, a first pass over the gradients gives their norm;
/// sums are taken in parameter coordinates and combined in parameter order, so neither chunks nor budgets nor the order
/// in which sets are updated change a bit of it.
///
/// A set is updated by the background thread, or by the thread that first uses one of its chunks if the background has
/// not come to it. One set is updated at a time. What the update needs is announced to residency, which brings it
/// ahead, in the order in which the sets are needed; but gradients leave the device in the order in which they were
/// made, which is the reverse: the background begins with what is there. Where it finds no room, it waits until another
/// has.
///
/// A thread of the program that waits for another's update is stalled. Where it updates by itself it computes, and what
/// it waits for in that is a stall for the chunks' own reasons.
///
/// Threads: `submit` and `add` are called by one thread at a time; everything else by any. An error of an update
/// reaches the accesses of what it owed, and `finish`; everything owed after it fails with it too. Want of room is not
/// final: it reaches who asks, and the next who asks tries again. A job that was refused for its gradients has changed
/// nothing, and stands in the way of its own optimizer's next job only: the first to ask hears of it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "memory/access_stream.h"
#include "offload/processors.h"
#include "optimizer/update.h"

namespace terrace {

/// A job that was queued, for whoever wants its norm.
using UpdateTicket = std::shared_ptr<QueuedUpdate>;

class UpdateQueue final : public PriorWork {
 public:
  /// Asks `stream`, which outlives it, to send accesses here. `background`: whether a thread of its own works on what
  /// is queued; otherwise whoever needs a set updates it. What the kernels lack on this CPU is noted as a fallback.
  /// `threads`: that the arithmetic runs on; without a background gradients are summed up ahead by one. That thread,
  /// and those of oneTBB that help whoever updates, run on `processors`.
  UpdateQueue(AccessStream& stream, bool background, int threads, const Processors& processors = {});
  ~UpdateQueue() override;
  UpdateQueue(const UpdateQueue&) = delete;
  UpdateQueue& operator=(const UpdateQueue&) = delete;

  /// Finishes the jobs before and queues this one. Throws, and does not queue it, what `settle` does, and what
  /// `throw_refusal_of` does of the job's own optimizer, which is known by its report.
  UpdateTicket submit(UpdateJob job);
  /// Queues a job that needs no norm behind those before. Where it throws, the job is not queued.
  void add(UpdateJob job);
  /// Backward is probably done with the gradients in these runs of a chunk: they are summed up for the norm of the job
  /// that comes. Any thread.
  void expect_job_with(ChunkId gradient, ElementType type, std::vector<GradientRun> runs) {
    sums_.expect(gradient, type, std::move(runs));
  }
  /// Does or waits for the oldest, so that no more sets are left than the background can be kept busy with: what they
  /// hold, such as gradients, is let go of.
  void keep_few();
  /// Does or waits for everything queued. Throws the first error of an update.
  void settle();
  /// The same, and throws what `throw_refusal` does.
  void finish();
  /// The job's gradient norm before clipping, where one was needed. Does or waits for no more than that takes.
  std::optional<double> norm(const UpdateTicket& ticket);
  /// Throws the NonFiniteGradient of the first job that was refused, if nobody has had it yet. Waits for nothing.
  void throw_refusal();
  /// The same of one optimizer's jobs, by what they report to.
  void throw_refusal_of(const GradientReport* report);
  /// What `throw_refusal` would throw, one after the other: nobody else hears of them.
  std::vector<std::exception_ptr> take_refusals();

  void before_access(std::span<const ChunkAccess> accesses) override;

 private:
  using Lock = std::unique_lock<std::mutex>;
  /// A set of chunks to update.
  struct Item {
    enum class State : std::uint8_t { queued, running, done };

    UpdateTicket job;
    std::size_t position;  ///< among the job's sets
    State state = State::queued;

    const ChunkSet& chunks() const { return job->chunks(position); }
    const std::vector<ChunkAccess>& accesses() const { return job->accesses(position); }
  };
  /// Counts items from the first ever.
  using ItemId = std::uint64_t;

  UpdateTicket queue(UpdateJob job, Lock& lock);
  Item& item(ItemId id) { return items_[id - first_]; }
  ItemId end() const noexcept { return first_ + items_.size(); }
  bool is_done(ItemId id) { return id < first_ || item(id).state == Item::State::done; }
  void work_in_background();
  /// What somebody waits for; else the first of what the background is to update soon that has all it needs; else the
  /// first of all.
  ItemId next_for_background(const Lock& lock);
  /// Brings the set up to date, by this thread or by waiting for the one that is at it.
  void resolve(ItemId id, Lock& lock, AccessOrigin origin);
  void resolve_norm(Lock& lock, AccessOrigin origin);
  /// Waits for the one who runs a part of a job: until he is done with it, or what is `wanted` of it is there, which
  /// is an update of `chunk` or (without one) the norm.
  template <class Wanted>
  void await_other(Lock& lock, AccessOrigin origin, std::optional<ChunkId> chunk, const Wanted& wanted);
  /// Runs `work`, an update of the set of `parameter` or (without one) finding the norm, without the lock, as the only
  /// one at a time; what it throws fails all that is queued.
  template <class Work>
  void run_alone(Lock& lock, std::optional<ChunkId> parameter, Work&& work);
  void end_item(ItemId id, const Lock& lock);
  void settle(Lock& lock);
  /// If there is one among those of which nobody has heard.
  template <class Wanted>
  void throw_first_refusal(const Lock& lock, const Wanted& wanted);

  AccessStream& stream_;
  const UpdateThreads threads_;
  const UpdateThreads threads_of_sums_;
  GradientSums sums_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  ItemId first_ = 0;                          ///< of `items_`
  ItemId next_ = 0;                           ///< items before it are taken, or given up for now
  std::optional<ItemId> awaited_;             ///< by whoever came last to wait for a set
  std::unordered_map<ChunkId, ItemId> owed_;  ///< by chunk, what is not done
  std::atomic<bool> anything_owed_{false};
  UpdateTicket submitted_;   ///< the last job that may need a norm
  bool norm_known_ = true;   ///< of that one
  bool busy_ = false;        ///< somebody runs a part of the job
  std::size_t waiters_ = 0;  ///< for him
  std::exception_ptr error_;
  std::vector<UpdateTicket> refused_;  ///< of which nobody has heard, at most one of an optimizer's
  bool stopping_ = false;
  std::thread background_;  // last: it uses all of the above
};

}  // namespace terrace
