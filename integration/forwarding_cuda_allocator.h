/// Stands before LibTorch's allocator for CUDA devices, forwards every call to it, and has what it reserves of one
/// device counted while a session lives.
///
/// Blocks are the other allocator's, with its deleter: what is freed does not come by here, and tensors may outlive the
/// session. Of other devices, and under Pause, nothing is counted. Thread-safe, but for `attach` and `detach`, which
/// belong to the session.
#pragma once

#include <atomic>
#include <cstdint>

#include <c10/cuda/CUDACachingAllocator.h>

#include "integration/program_memory.h"
#include "memory/pool_budget.h"

namespace terrace {

class ForwardingCudaAllocator final : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
 public:
  using Base = c10::cuda::CUDACachingAllocator::CUDAAllocator;

  ForwardingCudaAllocator(Base& to, c10::DeviceIndex counted)
      : to_(to), counted_(counted), keeps_blocks_(to.name() == "native"), pool_(to, counted) {}

  SegmentPool& pool() noexcept { return pool_; }
  void attach(PoolBudget& budget, ProgramMemory& memory) noexcept;
  void detach() noexcept { budget_.store(nullptr, std::memory_order_release); }

  /// What a pool that serves a request of `bytes` can grow by, as LibTorch 2.11 rounds.
  static std::uint64_t most_growth(std::uint64_t bytes);
  /// The smallest block kept that surely serves it; 0 where it may come from the segments for small blocks.
  static std::uint64_t kept_block_needed(std::uint64_t bytes);

  // What may make the pool grow.
  c10::DataPtr allocate(std::size_t bytes) override;
  void* raw_alloc(std::size_t bytes) override;
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override;

  // What is forwarded as it is.
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return to_.is_simple_data_ptr(data); }
  c10::DeleterFnPtr raw_deleter() const override { return to_.raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { to_.copy_data(to, from, bytes); }
  bool initialized() override { return to_.initialized(); }
  void emptyCache(c10::MempoolId_t pool) override { to_.emptyCache(pool); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { to_.recordStream(data, stream); }
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override { to_.recordStream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return to_.getDeviceStats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { to_.resetAccumulatedStats(device); }
  void resetPeakStats(c10::DeviceIndex device) override { to_.resetPeakStats(device); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return to_.getMemoryInfo(device);
  }
  void raw_delete(void* data) override { to_.raw_delete(data); }
  void init(int device_count) override { to_.init(device_count); }
  double getMemoryFraction(c10::DeviceIndex device) override { return to_.getMemoryFraction(device); }
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override { to_.setMemoryFraction(fraction, device); }
  std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize> getExpandableSegmentSizes(
      c10::DeviceIndex device) override {
    return to_.getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { to_.enable(value); }
  bool isEnabled() const override { return to_.isEnabled(); }
  void cacheInfo(c10::DeviceIndex device, std::size_t* largest) override { to_.cacheInfo(device, largest); }
  void* getBaseAllocation(void* data, std::size_t* size) override { return to_.getBaseAllocation(data, size); }
  c10::cuda::CUDACachingAllocator::SnapshotInfo snapshot(c10::MempoolId_t pool, bool include_traces) override {
    return to_.snapshot(pool, include_traces);
  }
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    to_.beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    to_.endAllocateToPool(device, pool);
  }
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override { to_.releasePool(device, pool); }
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    return to_.getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool, std::shared_ptr<Base> allocator) override {
    to_.createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) override {
    to_.setUseOnOOM(device, pool, use_on_oom);
  }
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override { to_.setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return to_.checkPoolLiveAllocations(device, pool, expected);
  }
  c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void* data) override {
    return to_.shareIpcHandle(data);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return to_.getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() override { return to_.isHistoryEnabled(); }
  void recordHistory(bool enabled, c10::CachingDeviceAllocator::CreateContextFn recorder, std::size_t most_entries,
                     c10::CachingDeviceAllocator::RecordContext when, bool clear,
                     const std::vector<std::string>& skipped) override {
    to_.recordHistory(enabled, recorder, most_entries, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& annotation) override {
    to_.recordAnnotation(annotation);
  }
  void pushCompileContext(std::string& context) override { to_.pushCompileContext(context); }
  void popCompileContext() override { to_.popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { to_.setUserMetadata(metadata); }
  std::string getUserMetadata() override { return to_.getUserMetadata(); }
  void attachOutOfMemoryObserver(c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer) override {
    to_.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(c10::CachingDeviceAllocator::AllocatorTraceTracker tracker) override {
    to_.attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex to_access) override {
    to_.enablePeerAccess(device, to_access);
  }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                          cudaStream_t stream, bool p2p) override {
    return to_.memcpyAsync(to, to_device, from, from_device, bytes, stream, p2p);
  }
  std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                                                      c10::MempoolId_t pool) override {
    return to_.getCheckpointState(device, pool);
  }
  c10::cuda::CUDACachingAllocator::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device, std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> state) override {
    return to_.setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override { return to_.name(); }

 private:
  /// The other allocator, as the budget looks at it.
  class Pool final : public SegmentPool {
   public:
    Pool(Base& to, c10::DeviceIndex device) : to_(to), device_(device) {}
    std::uint64_t reserved_bytes() override;
    std::uint64_t largest_kept_bytes() override;
    void give_back_kept() override { to_.emptyCache({0, 0}); }

   private:
    Base& to_;
    const c10::DeviceIndex device_;
  };

  template <class Call>
  auto counted(std::size_t bytes, const cudaStream_t* stream, Call&& call) -> decltype(call());

  Base& to_;
  const c10::DeviceIndex counted_;
  const bool keeps_blocks_;  ///< LibTorch's own; how others, such as cudaMallocAsync, serve a call is not known
  Pool pool_;
  std::atomic<PoolBudget*> budget_{nullptr};
  std::atomic<ProgramMemory*> memory_{nullptr};
};

}  // namespace terrace
