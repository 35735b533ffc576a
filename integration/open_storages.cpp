#include "integration/open_storages.h"

#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace terrace {
namespace {

using namespace std::chrono_literals;

/// An op that was refused fails as soon as it touches its operands. Who was refused for its sake alone keeps others off
/// in turn, so without patience threads that share parameters would have refusals go round among them.
constexpr auto refused_op_patience = 5'000us;
constexpr auto refused_op_poll = 50us;

}  // namespace

void OpenStorages::add(ManagedStorage& storage, Access mode) {
  storages_.push_back(storage.shared_from_this());
  accesses_.push_back({storage.chunk(), Tier::device, mode});
  places_.push_back(nullptr);
}

void OpenStorages::open(AccessOrigin origin) {
  if (storages_.empty()) {
    return;
  }
  for (auto waited = 0us; !is_open_; waited += refused_op_poll) {
    stream_.acquire({accesses_.data(), accesses_.size()}, origin, {places_.data(), places_.size()});
    const std::exception_ptr refusal = open_storages_or_refusal();
    is_open_ = refusal == nullptr;
    if (!is_open_) {
      stream_.release({accesses_.data(), accesses_.size()});
      if (waited >= refused_op_patience) {
        std::rethrow_exception(refusal);
      }
      std::this_thread::sleep_for(refused_op_poll);
    }
  }
}

std::exception_ptr OpenStorages::open_storages_or_refusal() {
  const std::scoped_lock lock(storages_.front()->registry().mutex);
  for (const auto& storage : storages_) {
    if (storage->refusal()) {
      return storage->refusal();
    }
  }
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    storages_[i]->open(places_[i]->device);
  }
  return nullptr;
}

void OpenStorages::end() noexcept {
  if (std::exchange(is_open_, false)) {
    {
      const std::scoped_lock lock(storages_.front()->registry().mutex);
      for (const auto& storage : storages_) {
        storage->close();
      }
    }
    stream_.release({accesses_.data(), accesses_.size()});
  }
  storages_.clear();
  kept_.clear();
}

}  // namespace terrace
