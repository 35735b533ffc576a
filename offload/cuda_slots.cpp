#include "offload/cuda_slots.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/units.h"

namespace terrace {

CudaSlots::CudaSlots(CudaDriver& driver, CudaFences& fences, const Budget& budget)
    : driver_(driver), fences_(fences), budget_(budget), granule_bytes_(driver.granularity()) {}

CudaSlots::~CudaSlots() {
  try {
    keep_nothing();
  } catch (const Error& error) {
    log(LogLevel::error, error.message() + ", as the device's memory was given back");
  }
}

std::uint64_t CudaSlots::rounded(std::uint64_t bytes) const noexcept {
  return (bytes + granule_bytes_ - 1) / granule_bytes_ * granule_bytes_;
}

CudaSlots::Taken CudaSlots::take(std::uint64_t bytes) {
  const auto count = static_cast<std::size_t>(rounded(bytes) / granule_bytes_);
  for (;;) {
    if (const std::optional<Taken> kept = take_kept(count)) {
      return *kept;
    }
    const Lock reshaping(reshaping_);
    std::optional<std::vector<CudaMemory>> granules = gather(count);
    if (!granules) {
      if (const std::optional<Taken> kept = take_kept(count, Lock(mutex_))) {
        return *kept;
      }
      continue;  // another thread was faster
    }
    Slot slot;
    slot.granules = std::move(*granules);
    try {
      slot.address = map_together(slot.granules);
    } catch (...) {
      put_back(std::move(slot.granules), Lock(mutex_));
      throw;
    }
    std::byte* const address = slot.address;
    const Lock lock(mutex_);
    used_.emplace(address, std::move(slot));
    return {address, {}};
  }
}

void CudaSlots::give_back(std::byte* address, Fence last_use) {
  const Lock lock(mutex_);
  const auto found = used_.find(address);
  if (found == used_.end()) {
    throw LogicError("device: a slot is given back that is not in use");
  }
  Slot& slot = found->second;
  slot.last_use = std::max(slot.last_use, last_use);  // that of who had it before, where it was not used since
  const std::size_t count = slot.granules.size();
  std::deque<Slot>& alike = free_[count];
  const auto later = std::find_if(alike.rbegin(), alike.rend(), [&](const Slot& each) {
                       return each.last_use <= slot.last_use;
                     }).base();
  alike.insert(later, std::move(slot));
  used_.erase(found);
  kept_ += count;
}

std::uint64_t CudaSlots::keep_within_budget() {
  return release_kept([this] { return kept_ * granule_bytes_ <= budget_.free(); });
}

std::uint64_t CudaSlots::keep_nothing() {
  return release_kept([] { return false; });
}

std::uint64_t CudaSlots::physical_bytes() const {
  const Lock lock(mutex_);
  return made_ * granule_bytes_;
}

std::uint64_t CudaSlots::kept_bytes() const {
  const Lock lock(mutex_);
  return kept_ * granule_bytes_;
}

std::optional<CudaSlots::Taken> CudaSlots::take_kept(std::size_t count) {
  Fence last_use{};
  {
    const Lock lock(mutex_);
    const Slot* const first = first_kept(count, lock);
    if (first == nullptr) {
      return std::nullopt;
    }
    if (!has_room_for(count, lock)) {
      return take_kept(count, lock);
    }
    last_use = first->last_use;
  }
  // The driver is asked under no lock.
  return fences_.reached(last_use) ? take_kept(count, Lock(mutex_)) : std::nullopt;
}

std::optional<CudaSlots::Taken> CudaSlots::take_kept(std::size_t count, const Lock& lock) {
  Slot* const slot = first_kept(count, lock);
  if (slot == nullptr) {
    return std::nullopt;
  }
  const Taken taken{slot->address, slot->last_use};
  used_.emplace(taken.address, std::move(*slot));
  free_.at(count).pop_front();
  kept_ -= count;
  return taken;
}

CudaSlots::Slot* CudaSlots::first_kept(std::size_t count, const Lock& /*lock*/) {
  const auto alike = free_.find(count);
  return alike == free_.end() || alike->second.empty() ? nullptr : &alike->second.front();
}

/// Whether a slot that is counted in the budget already can be had without taking others apart.
bool CudaSlots::has_room_for(std::size_t count, const Lock& /*lock*/) const {
  const std::size_t made_for_it = count - std::min(count, loose_.size());
  return made_for_it == 0 ||
         ((made_ + made_for_it) * granule_bytes_ <= budget_.capacity() && kept_ * granule_bytes_ <= budget_.free());
}

/// Granules for a slot that is counted in the budget already: loose ones, new ones while those that are kept fit into
/// what the budget has free, and else those of slots of other sizes.
std::optional<std::vector<CudaMemory>> CudaSlots::gather(std::size_t count) {
  std::vector<CudaMemory> granules;
  granules.reserve(count);
  try {
    while (granules.size() < count) {
      Lock lock(mutex_);
      if (!loose_.empty()) {
        granules.push_back(loose_.back());
        loose_.pop_back();
        --kept_;
        continue;
      }
      const bool all_made = (made_ + 1) * granule_bytes_ > budget_.capacity();
      if (all_made && kept_ == 0) {
        throw OutOfMemory("device: a slot of " + format_bytes(count * granule_bytes_) +
                          " is wanted, and all of the device's memory is in use; " + budget_.describe());
      }
      const bool may_make = has_room_for(1, lock);
      const bool can_do_without = granules.empty() && first_kept(count, lock) != nullptr;
      lock.unlock();
      if (!may_make) {
        if (can_do_without) {
          return std::nullopt;
        }
        take_one_apart();  // where another thread was faster, look again
        continue;
      }
      try {
        granules.push_back(driver_.create_memory(granule_bytes_));
      } catch (const OutOfMemory&) {
        if (can_do_without) {
          return std::nullopt;
        }
        if (!take_one_apart()) {
          throw;
        }
        continue;
      }
      lock.lock();
      ++made_;
    }
  } catch (...) {
    put_back(std::move(granules), Lock(mutex_));
    throw;
  }
  return granules;
}

std::byte* CudaSlots::map_together(const std::vector<CudaMemory>& granules) {
  const std::uint64_t bytes = granules.size() * granule_bytes_;
  std::byte* const address = driver_.reserve_addresses(bytes);
  std::uint64_t mapped = 0;
  try {
    for (const CudaMemory granule : granules) {
      driver_.map(address + mapped, granule_bytes_, granule);
      mapped += granule_bytes_;
    }
    driver_.allow_access(address, bytes);
  } catch (...) {
    if (mapped > 0) {
      driver_.unmap(address, mapped);
    }
    driver_.free_addresses(address, bytes);
    throw;
  }
  return address;
}

bool CudaSlots::take_one_apart() {
  Lock lock(mutex_);
  std::deque<Slot>* oldest = nullptr;
  for (auto& [count, slots] : free_) {
    if (!slots.empty() && (oldest == nullptr || slots.front().last_use < oldest->front().last_use)) {
      oldest = &slots;
    }
  }
  if (oldest == nullptr) {
    return false;
  }
  Slot slot = std::move(oldest->front());
  oldest->pop_front();
  lock.unlock();
  const std::uint64_t bytes = slot.granules.size() * granule_bytes_;
  try {
    fences_.wait(slot.last_use);
    driver_.unmap(slot.address, bytes);
  } catch (...) {
    lock.lock();
    oldest->push_front(std::move(slot));
    throw;
  }
  driver_.free_addresses(slot.address, bytes);
  lock.lock();
  loose_.insert(loose_.end(), slot.granules.begin(), slot.granules.end());
  return true;
}

void CudaSlots::put_back(std::vector<CudaMemory> granules, const Lock& /*lock*/) {
  loose_.insert(loose_.end(), granules.begin(), granules.end());
  kept_ += granules.size();
}

template <class Enough>
std::uint64_t CudaSlots::release_kept(Enough&& enough) {
  const Lock reshaping(reshaping_);
  std::uint64_t released = 0;
  Lock lock(mutex_);
  while (kept_ > 0 && !enough()) {
    if (loose_.empty()) {
      lock.unlock();
      const bool found = take_one_apart();
      lock.lock();
      if (!found) {
        break;
      }
      continue;
    }
    const CudaMemory granule = loose_.back();
    loose_.pop_back();
    --kept_;
    lock.unlock();
    driver_.release_memory(granule);
    released += granule_bytes_;
    lock.lock();
    --made_;
  }
  return released;
}

}  // namespace terrace
