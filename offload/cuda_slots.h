/// Slots on a CUDA device: address ranges over granules of its physical memory.
///
/// Granules are made as they are needed. A slot that is given back stays mapped and serves the next one of its size,
/// at once where computation no longer uses it, and where the budget has no room for another to be made. For other
/// sizes it is taken apart, which waits until the computation that may still use it has ended, and its granules are
/// mapped elsewhere. So slots of several sizes do not fragment the device, and in the steady state nothing is mapped
/// anew.
///
/// What counts where: the budget counts slots in use, and whatever else uses the device. Granules that are kept free
/// count nowhere: `take` makes no granule, but takes slots apart, where kept ones exceed what the budget has free.
/// Whoever uses the device beside slots reserves its part and then calls `keep_within_budget` before it takes the
/// memory: what is mapped, kept and used beside slots never exceeds the capacity together.
///
/// Thread-safe. No lock is held while computation is waited for but that of `reshaping_`, which only those who lack
/// memory take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "offload/budget.h"
#include "offload/cuda_driver.h"
#include "offload/cuda_fences.h"

namespace terrace {

class CudaSlots {
 public:
  CudaSlots(CudaDriver& driver, CudaFences& fences, const Budget& budget);
  CudaSlots(const CudaSlots&) = delete;
  CudaSlots& operator=(const CudaSlots&) = delete;
  /// Slots have been given back. Waits for the computation that may use them.
  ~CudaSlots();

  std::uint64_t rounded(std::uint64_t bytes) const noexcept;

  struct Taken {
    std::byte* address;
    Fence free_after;  ///< who used the range before has ended by then
  };
  /// A slot of `rounded(bytes)`, which are counted in the budget already, with undefined contents. Throws OutOfMemory
  /// if the capacity or the device has no more.
  Taken take(std::uint64_t bytes);
  void give_back(std::byte* address, Fence last_use);

  /// Gives granules that are kept free back to the device until they fit into what the budget has free, or all of them.
  /// Waits for computation that may use them. Returns how many bytes.
  std::uint64_t keep_within_budget();
  std::uint64_t keep_nothing();

  /// Bytes of granules that there are, and of those that are kept free.
  std::uint64_t physical_bytes() const;
  std::uint64_t kept_bytes() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Slot {
    std::byte* address = nullptr;
    std::vector<CudaMemory> granules;
    Fence last_use{};
  };

  /// A kept slot of so many granules, the one whose use ends first; nothing if there is none, or none whose use has
  /// ended although there is room for another slot.
  std::optional<Taken> take_kept(std::size_t count);
  /// The same, whether its use has ended or not.
  std::optional<Taken> take_kept(std::size_t count, const Lock& lock);
  bool has_room_for(std::size_t count, const Lock& lock) const;
  /// Null if there is none.
  Slot* first_kept(std::size_t count, const Lock& lock);
  /// Nothing where slots would have to be taken apart for them, and one of so many is kept.
  std::optional<std::vector<CudaMemory>> gather(std::size_t count);
  std::byte* map_together(const std::vector<CudaMemory>& granules);
  /// Takes the free slot apart that has been unused for longest; false if there is none. `reshaping_` is held.
  bool take_one_apart();
  void put_back(std::vector<CudaMemory> granules, const Lock& lock);
  template <class Enough>
  std::uint64_t release_kept(Enough&& enough);

  CudaDriver& driver_;
  CudaFences& fences_;
  const Budget& budget_;
  const std::uint64_t granule_bytes_;

  std::mutex reshaping_;  ///< before `mutex_`
  mutable std::mutex mutex_;
  std::unordered_map<std::byte*, Slot> used_;
  std::map<std::size_t, std::deque<Slot>> free_;  ///< by their number of granules, in the order of their last use
  std::vector<CudaMemory> loose_;                 ///< granules that are mapped nowhere
  std::size_t made_ = 0;                          ///< granules that there are
  std::size_t kept_ = 0;                          ///< those of no slot in use
};

}  // namespace terrace
