#include "integration/pending_activations.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/graph_task.h>

#include "integration/offloaded_activation.h"
#include "integration/thread_owned.h"

namespace terrace {
namespace {

using Departure = OffloadedActivation::Departure;

/// One that may still have to leave.
struct Pending {
  std::weak_ptr<OffloadedActivation> activation;
  int backward;  ///< within which it was saved; -1: none

  /// Whether it is done with.
  bool leaves() const noexcept { return departure() != Departure::later; }
  Departure departure() const noexcept {
    const auto lives = activation.lock();
    const Departure departure = lives != nullptr ? lives->try_leave() : Departure::never;
    if (lives != nullptr && departure != Departure::later) {
      lives->is_pending_no_more();
    }
    return departure;
  }
};

/// What a thread has saved that may still have to leave. Whoever works at it takes it all and gives it back, so that
/// nobody waits for another's work.
class PendingList {
 public:
  void add(const std::shared_ptr<OffloadedActivation>& activation) {
    if (activation->becomes_pending()) {
      const std::scoped_lock lock(mutex_);
      list_.push_back({activation, torch::autograd::get_current_graph_task_id()});
      ++count_;
    }
  }

  /// With what somebody works at.
  bool empty() const noexcept { return count_ == 0; }

  /// Has some leave: the latest, which programs let go of first, and the others in turn.
  void some_leave() noexcept {
    const int backward = torch::autograd::get_current_graph_task_id();
    std::vector<Pending> list = take();
    const auto leave = [&](std::size_t at) {
      // What was saved before it the backward that runs may want now.
      if ((backward == -1 || list[at].backward == backward) && list[at].leaves()) {
        remove(list, at);
      }
    };
    const std::size_t others = list.size() - std::min(list.size(), latest);
    for (std::size_t i = list.size(); i-- > others;) {
      leave(i);
    }
    for (std::size_t looked = 0; looked < std::min(others, in_turn) && !list.empty(); ++looked) {
      turn_ = turn_ == 0 ? list.size() - 1 : std::min(turn_, list.size()) - 1;
      leave(turn_);
    }
    give_back(std::move(list));
  }

  /// Whether any has left.
  bool all_leave() noexcept {
    bool any = false;
    std::vector<Pending> list = take();
    for (std::size_t i = list.size(); i-- > 0;) {
      const Departure departure = list[i].departure();
      any = any || departure == Departure::has_left;
      if (departure != Departure::later) {
        remove(list, i);
      }
    }
    give_back(std::move(list));
    return any;
  }

 private:
  static constexpr std::size_t latest = 16;
  static constexpr std::size_t in_turn = 16;

  std::vector<Pending> take() noexcept {
    const std::scoped_lock lock(mutex_);
    return std::exchange(list_, {});
  }
  void give_back(std::vector<Pending> list) noexcept {
    const std::scoped_lock lock(mutex_);
    list_.swap(list);
    list_.insert(list_.end(), list.begin(), list.end());  // what was saved meanwhile
  }
  void remove(std::vector<Pending>& list, std::size_t at) noexcept {
    std::swap(list[at], list.back());
    list.pop_back();
    --count_;
  }

  std::mutex mutex_;
  std::vector<Pending> list_;
  std::atomic<std::size_t> count_{0};
  std::size_t turn_ = 0;  // of the thread whose list it is
};

/// The lists of all threads, and of those that have ended with some left; the first is for what they save as they end.
class AllPending {
 public:
  static AllPending& of_the_process() {
    static auto* const all = new AllPending;  // never destroyed: threads end late
    return *all;
  }

  std::shared_ptr<PendingList> add_list() {
    const std::scoped_lock lock(mutex_);
    return lists_.emplace_back(std::make_shared<PendingList>());
  }
  PendingList& of_ended_threads() { return *ended_; }
  /// Its thread ends.
  void end(const std::shared_ptr<PendingList>& list) {
    const std::scoped_lock lock(mutex_);
    if (list->empty()) {
      std::erase(lists_, list);
    }
  }

  bool leave() {
    std::vector<std::shared_ptr<PendingList>> lists;
    {
      const std::scoped_lock lock(mutex_);
      lists = lists_;
    }
    bool any = false;
    for (const auto& list : lists) {
      any = list->all_leave() || any;
    }
    const std::scoped_lock lock(mutex_);
    lists.clear();
    std::erase_if(lists_,
                  [](const auto& list) { return list.use_count() == 1 && list->empty(); });  // its thread is over
    return any;
  }

 private:
  AllPending() : ended_(add_list()) {}

  std::mutex mutex_;
  std::vector<std::shared_ptr<PendingList>> lists_;
  const std::shared_ptr<PendingList> ended_;
};

/// Its list outlives the thread, if something is left in it.
struct ListOfThread {
  ListOfThread() : list(AllPending::of_the_process().add_list()) {}
  ~ListOfThread() { AllPending::of_the_process().end(list); }
  ListOfThread(const ListOfThread&) = delete;
  ListOfThread& operator=(const ListOfThread&) = delete;

  const std::shared_ptr<PendingList> list;
};

}  // namespace

void add_pending(const std::shared_ptr<OffloadedActivation>& activation) {
  const ListOfThread* const own = ThreadOwned<ListOfThread>::get();
  (own != nullptr ? *own->list : AllPending::of_the_process().of_ended_threads()).add(activation);
}

bool some_pending_leave() noexcept {
  const ListOfThread* const own = ThreadOwned<ListOfThread>::get_if_made();
  if (own == nullptr || own->list->empty()) {
    return false;
  }
  own->list->some_leave();
  return true;
}

bool all_pending_leave() noexcept {
  static constinit thread_local bool is_leaving = false;
  if (is_leaving) {
    return false;
  }
  is_leaving = true;
  const bool any = AllPending::of_the_process().leave();
  is_leaving = false;
  return any;
}

}  // namespace terrace
