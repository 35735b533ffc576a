#include "optimizer/update_queue.h"

#include <utility>

#include "base/clock.h"
#include "base/error.h"
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

}  // namespace

UpdateQueue::UpdateQueue(AccessStream& stream, bool background, int threads) : stream_(stream), threads_(threads) {
  note_instruction_set();
  stream_.set_prior_work(this);
  if (background) {
    background_ = std::thread([this] { work_in_background(); });
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
  }
  changed_.notify_all();
  if (background_.joinable()) {
    background_.join();
  }
}

UpdateTicket UpdateQueue::submit(UpdateJob job) {
  finish();
  Lock lock(mutex_);
  job_ = std::make_shared<QueuedUpdate>(stream_, threads_, std::move(job));
  states_.assign(job_->size(), State::queued);
  left_ = job_->size();
  next_ = 0;
  norm_known_ = !job_->clips();
  std::vector<ChunkId> announced;
  std::vector<ChunkId> owed;
  for (std::size_t item = 0; item < job_->size(); ++item) {
    if (job_->clips()) {
      announced.push_back(*job_->chunks(item).gradient);
    }
  }
  for (std::size_t item = 0; item < job_->size(); ++item) {
    for (const ChunkAccess& access : job_->accesses(item)) {
      owed_[access.chunk] = item;
      announced.push_back(access.chunk);
      owed.push_back(access.chunk);
    }
  }
  anything_owed_ = left_ > 0;
  stream_.set_update_queued(owed, true);
  stream_.announce(std::move(announced));
  changed_.notify_all();
  return job_;
}

void UpdateQueue::finish() {
  Lock lock(mutex_);
  for (std::size_t item = 0; item < states_.size() && !error_; ++item) {
    resolve(item, lock, AccessOrigin::prior_work);
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
}

std::optional<double> UpdateQueue::norm(const UpdateTicket& ticket) {
  Lock lock(mutex_);
  if (ticket == job_) {
    resolve_norm(lock, AccessOrigin::prior_work);
  }
  return ticket->norm();
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
    const bool is_gradient = job_->chunks(owed->second).gradient == access.chunk;
    if (!is_gradient || access.mode == Access::write) {
      resolve(owed->second, lock, AccessOrigin::prior_work);
    }
  }
}

void UpdateQueue::work_in_background() {
  Lock lock(mutex_);
  while (!stopping_) {
    if (error_ || busy_ || next_ >= states_.size()) {
      changed_.wait(lock);
    } else if (states_[next_] != State::queued) {
      ++next_;
    } else {
      try {
        resolve(next_, lock, AccessOrigin::background_work);
      } catch (...) {
        // Whoever needs the bytes hears of it, or tries again.
        next_ = states_.size();
      }
    }
  }
}

void UpdateQueue::resolve(std::size_t item, Lock& lock, AccessOrigin origin) {
  const UpdateTicket job = job_;
  resolve_norm(lock, origin);
  // Where another job has taken its place meanwhile, this one is finished.
  const auto wanted = [&] { return job == job_ && states_[item] != State::done; };
  while (wanted()) {
    if (error_) {
      std::rethrow_exception(error_);
    }
    if (busy_) {
      await_other(lock, origin, job->chunks(item).parameter, wanted);
      continue;
    }
    states_[item] = State::running;
    try {
      run_alone(lock, job->chunks(item).parameter, [&] { job->update(item, origin); });
    } catch (...) {
      states_[item] = State::queued;
      throw;
    }
    end_item(item, lock);
  }
}

void UpdateQueue::resolve_norm(Lock& lock, AccessOrigin origin) {
  const auto wanted = [&] { return !norm_known_; };
  while (wanted()) {
    if (error_) {
      std::rethrow_exception(error_);
    }
    if (busy_) {
      await_other(lock, origin, std::nullopt, wanted);
      continue;
    }
    const UpdateTicket job = job_;
    run_alone(lock, std::nullopt, [&] { job->find_norm(origin); });
    if (job == job_) {
      norm_known_ = true;
    }
  }
}

template <class Wanted>
void UpdateQueue::await_other(Lock& lock, AccessOrigin origin, std::optional<ChunkId> chunk, const Wanted& wanted) {
  const std::int64_t begin_ns = monotonic_ns();
  changed_.wait(lock, [&] { return !busy_ || !wanted(); });
  if (origin != AccessOrigin::background_work) {
    stream_.note_wait_for_update(chunk, begin_ns, monotonic_ns());
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
}

void UpdateQueue::end_item(std::size_t item, const Lock&) {
  states_[item] = State::done;
  std::vector<ChunkId> chunks;
  for (const ChunkAccess& access : job_->accesses(item)) {
    owed_.erase(access.chunk);
    // A gradient is rarely wanted again: it ends with the next write or discard.
    if (access.mode == Access::write) {
      chunks.push_back(access.chunk);
    }
  }
  anything_owed_.store(--left_ > 0, std::memory_order_release);
  stream_.set_update_queued(chunks, false);
}

}  // namespace terrace
