#include "optimizer/update_queue.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "offload/start_thread.h"
#include "optimizer/instruction_set.h"

namespace terrace {
namespace {

/// Nothing has changed, and what stood in the way may be gone the next time: room that others held for a moment.
bool is_passing(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const OutOfMemory&) {
    return true;
  } catch (const LogicError&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// Among which the background looks for one that has all it needs. What was made last is on its way still; what is
/// needed much later would take room on the device from what is needed first.
constexpr std::size_t sets_looked_at = 4;

}  // namespace

UpdateQueue::UpdateQueue(AccessStream& stream, bool background, int threads, const Processors& processors)
    : stream_(stream),
      threads_(threads, processors),
      threads_of_sums_(background ? threads : 1, processors),
      sums_(stream, threads_of_sums_, processors) {
  note_instruction_set();
  stream_.set_prior_work(this);
  if (background) {
    background_ = start_thread<std::thread>("optimizer: starting the thread of updates", processors,
                                            [this] { work_in_background(); });
  }
}

UpdateQueue::~UpdateQueue() {
  try {
    finish();
  } catch (...) {
    // Whoever wants to know calls `finish` before.
  }
  stream_.set_prior_work(nullptr);
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    stream_.set_updates_awaited(true);  // whoever is at one is to end
  }
  changed_.notify_all();
  if (background_.joinable()) {
    background_.join();
  }
  stream_.set_updates_awaited(false);
}

UpdateTicket UpdateQueue::submit(UpdateJob job) {
  settle();
  throw_refusal_of(job.report.get());
  Lock lock(mutex_);
  submitted_ = queue(std::move(job), lock);
  norm_known_ = !submitted_->needs_norm();
  return submitted_;
}

void UpdateQueue::add(UpdateJob job) {
  Lock lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
  queue(std::move(job), lock);
}

void UpdateQueue::keep_few() {
  Lock lock(mutex_);
  const std::ptrdiff_t most_left = background_.joinable() ? 2 : 0;  // one in work, and one that is on its way
  const auto left = [&] {
    return std::count_if(items_.begin(), items_.end(),
                         [](const Item& each) { return each.state != Item::State::done; });
  };
  while (left() > most_left) {
    resolve(first_, lock, AccessOrigin::prior_work);  // which is not done: what is leaves the front
  }
}

UpdateTicket UpdateQueue::queue(UpdateJob queued, Lock& lock) {
  for (const Segment& segment : queued.segments) {
    while (owed_.contains(segment.chunks.parameter)) {
      resolve(owed_.at(segment.chunks.parameter), lock, AccessOrigin::prior_work);
    }
  }
  const auto job = std::make_shared<QueuedUpdate>(stream_, threads_, sums_, std::move(queued));
  std::vector<ChunkId> gradients;
  std::vector<ChunkId> owed;
  for (std::size_t position = 0; position < job->size(); ++position) {
    gradients.push_back(*job->chunks(position).gradient);
    for (const ChunkAccess& access : job->accesses(position)) {
      owed_[access.chunk] = end();
      owed.push_back(access.chunk);
    }
    items_.push_back({.job = job, .position = position});
  }
  anything_owed_ = !owed_.empty();
  sums_.expect_no_more(gradients);  // the job itself reads what has not come to the host yet
  std::vector<ChunkId> announced;
  for (std::size_t position = 0; position < job->size(); ++position) {
    if (job->reads_for_norm(position)) {
      announced.push_back(*job->chunks(position).gradient);
    }
  }
  for (const Item& each : items_) {
    if (each.state != Item::State::done) {
      for (const ChunkAccess& access : each.accesses()) {
        announced.push_back(access.chunk);
      }
    }
  }
  stream_.set_update_queued(owed, true);
  stream_.announce(std::move(announced));
  changed_.notify_all();
  return job;
}

void UpdateQueue::settle() {
  Lock lock(mutex_);
  settle(lock);
}

void UpdateQueue::finish() {
  Lock lock(mutex_);
  settle(lock);
  throw_first_refusal(lock, [](const UpdateTicket&) { return true; });
}

void UpdateQueue::settle(Lock& lock) {
  for (ItemId id = first_; id < end() && !error_; ++id) {
    resolve(id, lock, AccessOrigin::prior_work);
  }
  if (submitted_ != nullptr && !error_) {
    resolve_norm(lock, AccessOrigin::prior_work);  // of one that updates nothing, too
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
}

std::optional<double> UpdateQueue::norm(const UpdateTicket& ticket) {
  Lock lock(mutex_);
  if (ticket == submitted_) {
    resolve_norm(lock, AccessOrigin::prior_work);
  }
  return ticket->norm();
}

void UpdateQueue::throw_refusal() {
  const Lock lock(mutex_);
  throw_first_refusal(lock, [](const UpdateTicket&) { return true; });
}

void UpdateQueue::throw_refusal_of(const GradientReport* report) {
  const Lock lock(mutex_);
  throw_first_refusal(lock, [report](const UpdateTicket& job) { return job->report() == report; });
}

template <class Wanted>
void UpdateQueue::throw_first_refusal(const Lock&, const Wanted& wanted) {
  if (const auto found = std::find_if(refused_.begin(), refused_.end(), wanted); found != refused_.end()) {
    const std::exception_ptr refusal = (*found)->refusal();
    refused_.erase(found);
    std::rethrow_exception(refusal);
  }
}

std::vector<std::exception_ptr> UpdateQueue::take_refusals() {
  const Lock lock(mutex_);
  std::vector<std::exception_ptr> refusals;
  for (const UpdateTicket& job : std::exchange(refused_, {})) {
    refusals.push_back(job->refusal());
  }
  return refusals;
}

void UpdateQueue::before_access(std::span<const ChunkAccess> accesses) {
  if (!anything_owed_.load(std::memory_order_acquire)) {
    return;
  }
  Lock lock(mutex_);
  for (const ChunkAccess& access : accesses) {
    const auto owed = owed_.find(access.chunk);
    if (owed == owed_.end()) {
      continue;
    }
    // A gradient may be read beside its update, which only reads it.
    const bool is_gradient = item(owed->second).chunks().gradient == access.chunk;
    if (!is_gradient || access.mode == Access::write) {
      resolve(owed->second, lock, AccessOrigin::prior_work);
    }
  }
}

void UpdateQueue::work_in_background() {
  Lock lock(mutex_);
  while (!stopping_) {
    next_ = std::max(next_, first_);
    if (error_ || busy_ || next_ == end()) {
      changed_.wait(lock);
    } else if (item(next_).state != Item::State::queued) {
      ++next_;
    } else {
      try {
        if (item(next_).job == submitted_ && !norm_known_) {
          resolve_norm(lock, AccessOrigin::background_work);
        } else {
          resolve(next_for_background(lock), lock, AccessOrigin::background_work);
        }
      } catch (...) {
        // Whoever needs the bytes hears of it, or tries again. Not this thread, nor with another set: nothing says
        // when there will be room, and what could leave has left for this attempt, which the program needs sooner.
        next_ = end();
      }
    }
  }
}

UpdateQueue::ItemId UpdateQueue::next_for_background(const Lock&) {
  if (awaited_ && !is_done(*awaited_) && item(*awaited_).state == Item::State::queued) {
    return *awaited_;
  }
  const ItemId looked_at = std::min(end(), next_ + sets_looked_at);
  for (ItemId id = next_; id < looked_at; ++id) {
    if (item(id).state == Item::State::queued && stream_.can_acquire(item(id).accesses())) {
      return id;
    }
  }
  return next_;
}

void UpdateQueue::resolve(ItemId id, Lock& lock, AccessOrigin origin) {
  const auto wanted = [&] { return !is_done(id); };
  if (wanted() && item(id).job == submitted_) {
    resolve_norm(lock, origin);
  }
  while (wanted()) {
    if (error_) {
      std::rethrow_exception(error_);
    }
    const ChunkId parameter = item(id).chunks().parameter;
    if (busy_) {
      awaited_ = id;
      await_other(lock, origin, parameter, wanted);
      continue;
    }
    item(id).state = Item::State::running;
    try {
      run_alone(lock, parameter,
                [&, job = item(id).job, position = item(id).position] { job->update(position, origin); });
    } catch (...) {
      item(id).state = Item::State::queued;
      throw;
    }
    end_item(id, lock);
  }
}

void UpdateQueue::resolve_norm(Lock& lock, AccessOrigin origin) {
  const UpdateTicket job = submitted_;
  // Where another job has taken its place meanwhile, this one is finished.
  const auto wanted = [&] { return job == submitted_ && !norm_known_; };
  while (wanted()) {
    if (error_) {
      std::rethrow_exception(error_);
    }
    if (busy_) {
      await_other(lock, origin, std::nullopt, wanted);
      continue;
    }
    run_alone(lock, std::nullopt, [&] { job->find_norm(origin); });
    if (wanted()) {
      norm_known_ = true;
      if (job->refusal()) {
        refused_.push_back(job);
      }
    }
  }
}

template <class Wanted>
void UpdateQueue::await_other(Lock& lock, AccessOrigin origin, std::optional<ChunkId> chunk, const Wanted& wanted) {
  const std::int64_t begin_ns = monotonic_ns();
  if (waiters_++ == 0) {
    stream_.set_updates_awaited(true);
  }
  const auto waits = [&] { return busy_ && wanted(); };
  if (origin == AccessOrigin::background_work) {
    changed_.wait(lock, [&] { return !waits(); });
  } else {
    DeviceIdle idle = stream_.device_idle();
    while (waits()) {
      idle.wait(changed_, lock);
    }
    const std::int64_t end_ns = monotonic_ns();
    stream_.note_wait_for_update(chunk, idle.begin_within(begin_ns, end_ns), end_ns);
  }
  if (--waiters_ == 0) {
    stream_.set_updates_awaited(false);
  }
}

template <class Work>
void UpdateQueue::run_alone(Lock& lock, std::optional<ChunkId> parameter, Work&& work) {
  busy_ = true;
  std::exception_ptr error;
  lock.unlock();
  const std::int64_t begin_ns = monotonic_ns();
  try {
    work();
    stream_.note_update(parameter, begin_ns, monotonic_ns());
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  busy_ = false;
  changed_.notify_all();
  if (error) {
    if (!is_passing(error)) {
      error_ = error;
    }
    std::rethrow_exception(error);
  }
  next_ = first_;  // where the background gave up there is room again: the rest need not wait until each is asked for
}

void UpdateQueue::end_item(ItemId id, const Lock&) {
  item(id).state = Item::State::done;
  std::vector<ChunkId> chunks;
  for (const ChunkAccess& access : item(id).accesses()) {
    owed_.erase(access.chunk);
    // A gradient is rarely wanted again: it ends with the next write or discard.
    if (access.mode == Access::write) {
      chunks.push_back(access.chunk);
    }
  }
  anything_owed_.store(!owed_.empty(), std::memory_order_release);
  stream_.set_update_queued(chunks, false);
  stream_.update_done(item(id).chunks().gradient.value());
  while (!items_.empty() && items_.front().state == Item::State::done) {
    items_.pop_front();
    ++first_;
  }
}

}  // namespace terrace
