#include "tests/offload/software_cuda.h"

#include <algorithm>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include <gtest/gtest.h>

#include "offload/cuda_device.h"
#include "tests/offload/software_cuda_stream.h"

namespace terrace {

SoftwareCuda::SoftwareCuda(const Options& options)
    : options_(options), default_stream_(std::make_unique<CUstream_st>(options.longest_delay, 0)) {
  file_ = ::memfd_create("software-cuda", MFD_CLOEXEC);
  EXPECT_GE(file_, 0);
}

SoftwareCuda::~SoftwareCuda() {
  default_stream_.reset();
  EXPECT_TRUE(streams_.empty()) << streams_.size() << " streams are left";
  EXPECT_TRUE(events_.empty()) << events_.size() << " events are left";
  EXPECT_TRUE(mapped_.empty()) << mapped_.size() << " mappings are left";
  EXPECT_TRUE(reserved_.empty()) << reserved_.size() << " address ranges are left";
  EXPECT_TRUE(memory_.empty()) << memory_.size() << " pieces of memory are left";
  EXPECT_TRUE(registered_.empty()) << registered_.size() << " ranges of host memory are registered";
  ::close(file_);
}

void SoftwareCuda::launch(CudaStream stream, std::vector<Range> touched, std::function<void()> kernel) {
  for (const Range range : touched) expect_accessible(range);
  stream_of(stream).issue(std::move(kernel), std::move(touched));
}

void SoftwareCuda::fail_next(const std::string& call, const std::string& error, int skipped) {
  const std::lock_guard lock(mutex_);
  faults_[call].push_back({error, skipped});
}

std::size_t SoftwareCuda::calls(const std::string& call) const {
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? 0 : found->second;
}

void SoftwareCuda::take_beside(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  take(bytes, "take_beside");
  beside_bytes_ += bytes;
}

void SoftwareCuda::give_back_beside(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  ASSERT_LE(bytes, beside_bytes_);
  beside_bytes_ -= bytes;
  physical_bytes_ -= bytes;
}

std::uint64_t SoftwareCuda::physical_bytes() const {
  const std::lock_guard lock(mutex_);
  return physical_bytes_;
}

std::uint64_t SoftwareCuda::peak_physical_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_physical_bytes_;
}

std::size_t SoftwareCuda::registered_ranges() const {
  const std::lock_guard lock(mutex_);
  return registered_.size();
}

CudaProperties SoftwareCuda::properties() {
  return {.name = "software", .compute_major = 9, .compute_minor = 0, .device_count = 1, .pci_address = ""};
}

CudaMemoryInfo SoftwareCuda::memory_info() {
  return {.free_bytes = options_.memory_bytes - physical_bytes(), .total_bytes = options_.memory_bytes};
}

CudaStream SoftwareCuda::create_stream() {
  enter("create_stream");
  const std::lock_guard lock(mutex_);
  return *streams_.insert(new CUstream_st(options_.longest_delay, streams_.size() + 1)).first;
}

void SoftwareCuda::destroy_stream(CudaStream stream) noexcept {
  {
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(streams_.erase(stream), 1u) << "no such stream";
  }
  delete stream;
}

void SoftwareCuda::synchronize(CudaStream stream) {
  enter("synchronize_stream");
  stream_of(stream).synchronize();
}

void SoftwareCuda::make_wait(CudaStream stream, CudaEvent event) {
  enter("make_wait");
  if (const std::shared_ptr<Mark> mark = event->mark()) {
    stream_of(stream).issue([mark] { mark->wait(); }, {});
  }
}

CudaEvent SoftwareCuda::create_event() {
  enter("create_event");
  const std::lock_guard lock(mutex_);
  return *events_.insert(new CUevent_st).first;
}

void SoftwareCuda::destroy_event(CudaEvent event) noexcept {
  {
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(events_.erase(event), 1u) << "no such event";
  }
  delete event;
}

void SoftwareCuda::record(CudaEvent event, CudaStream stream) {
  enter("record");
  stream_of(stream).issue([mark = event->record()] { mark->set(); }, {});
}

bool SoftwareCuda::reached(CudaEvent event) {
  enter("reached");
  const std::shared_ptr<Mark> mark = event->mark();
  return mark == nullptr || mark->is_set();
}

void SoftwareCuda::synchronize(CudaEvent event) {
  enter("synchronize_event");
  if (const std::shared_ptr<Mark> mark = event->mark()) mark->wait();
}

void SoftwareCuda::copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes, CudaStream stream) {
  enter("copy_in");
  expect_accessible({device, bytes});
  stream_of(stream).issue([=] { std::memcpy(device, host, bytes); }, {{device, bytes}});
}

void SoftwareCuda::copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes, CudaStream stream) {
  enter("copy_out");
  expect_accessible({device, bytes});
  stream_of(stream).issue([=] { std::memcpy(host, device, bytes); }, {{device, bytes}});
}

void SoftwareCuda::fill(std::byte* device, std::byte value, std::uint64_t bytes, CudaStream stream) {
  enter("fill");
  expect_accessible({device, bytes});
  stream_of(stream).issue([=] { std::memset(device, std::to_integer<int>(value), bytes); }, {{device, bytes}});
}

void SoftwareCuda::register_host(std::span<std::byte> host) {
  enter("register_host");
  const std::lock_guard lock(mutex_);
  for (const auto& [start, bytes] : registered_) {
    if (overlap({start, bytes}, host)) {
      throw_cuda_error("register_host", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "already registered");
    }
  }
  registered_.emplace(host.data(), host.size());
}

void SoftwareCuda::unregister_host(std::span<std::byte> host) noexcept {
  const std::lock_guard lock(mutex_);
  EXPECT_EQ(registered_.erase(host.data()), 1u) << "this host memory is not registered";
}

std::uint64_t SoftwareCuda::granularity() {
  enter("granularity");
  return options_.granule_bytes;
}

CudaMemory SoftwareCuda::create_memory(std::uint64_t bytes) {
  enter("create_memory");
  EXPECT_EQ(bytes % options_.granule_bytes, 0u);
  const std::lock_guard lock(mutex_);
  take(bytes, "create_memory");
  const auto memory = static_cast<CudaMemory>(file_end_);
  file_end_ += bytes;  // the file has holes where memory was given up
  EXPECT_EQ(::ftruncate(file_, static_cast<off_t>(file_end_)), 0);
  memory_.emplace(memory, Memory{.bytes = bytes});
  return memory;
}

void SoftwareCuda::release_memory(CudaMemory memory) noexcept {
  const std::lock_guard lock(mutex_);
  Memory& released = memory_.at(memory);
  EXPECT_FALSE(released.released) << "memory is released twice";
  released.released = true;
  give_up_where_unused(memory);
}

std::byte* SoftwareCuda::reserve_addresses(std::uint64_t bytes) {
  enter("reserve_addresses");
  EXPECT_EQ(bytes % options_.granule_bytes, 0u);
  void* const address = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  EXPECT_NE(address, MAP_FAILED);
  const std::lock_guard lock(mutex_);
  reserved_.emplace(static_cast<std::byte*>(address), bytes);
  return static_cast<std::byte*>(address);
}

void SoftwareCuda::free_addresses(std::byte* address, std::uint64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = reserved_.find(address);
  EXPECT_TRUE(found != reserved_.end() && found->second == bytes) << "no such address range";
  for (const auto& [start, mapping] : mapped_) {
    EXPECT_FALSE(overlap({start, mapping.bytes}, {address, bytes})) << "something is still mapped there";
  }
  ::munmap(address, bytes);
  reserved_.erase(found);
}

void SoftwareCuda::map(std::byte* address, std::uint64_t bytes, CudaMemory memory) {
  enter("map");
  const std::lock_guard lock(mutex_);
  Memory& backing = memory_.at(memory);
  EXPECT_EQ(backing.bytes, bytes);
  const auto above = reserved_.upper_bound(address);
  EXPECT_TRUE(above != reserved_.begin() && std::prev(above)->first + std::prev(above)->second >= address + bytes)
      << "no addresses are reserved there";
  for (const auto& [start, mapping] : mapped_) {
    EXPECT_FALSE(overlap({start, mapping.bytes}, {address, bytes})) << "something is mapped there";
  }
  EXPECT_NE(::mmap(address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_, static_cast<off_t>(memory)), MAP_FAILED);
  ++backing.mapped;
  mapped_.emplace(address, Mapping{.bytes = bytes, .memory = memory});
}

void SoftwareCuda::allow_access(std::byte* address, std::uint64_t bytes) {
  enter("allow_access");
  const std::lock_guard lock(mutex_);
  std::uint64_t allowed = 0;
  for (auto& [start, mapping] : mapped_) {
    if (overlap({start, mapping.bytes}, {address, bytes})) {
      mapping.accessible = true;
      allowed += mapping.bytes;
    }
  }
  EXPECT_EQ(allowed, bytes) << "not all of the range is mapped";
  EXPECT_EQ(::mprotect(address, bytes, PROT_READ | PROT_WRITE), 0);
}

void SoftwareCuda::unmap(std::byte* address, std::uint64_t bytes) {
  enter("unmap");
  expect_untouched({address, bytes});
  const std::lock_guard lock(mutex_);
  std::uint64_t unmapped = 0;
  for (auto each = mapped_.lower_bound(address); each != mapped_.end() && each->first < address + bytes;) {
    unmapped += each->second.bytes;
    --memory_.at(each->second.memory).mapped;
    give_up_where_unused(each->second.memory);
    each = mapped_.erase(each);
  }
  EXPECT_EQ(unmapped, bytes) << "only whole mappings can be unmapped";
  EXPECT_NE(::mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0),
            MAP_FAILED);
}

void SoftwareCuda::enter(const std::string& call) {
  const std::lock_guard lock(mutex_);
  ++calls_[call];
  const auto found = faults_.find(call);
  if (found == faults_.end() || found->second.empty() || found->second.front().skipped-- > 0) return;
  const std::string error = found->second.front().error;
  found->second.pop_front();
  throw_cuda_error(call, error, "injected");
}

CUstream_st& SoftwareCuda::stream_of(CudaStream stream) {
  const std::lock_guard lock(mutex_);
  EXPECT_TRUE(stream == nullptr || streams_.count(stream) == 1) << "no such stream";
  return stream == nullptr ? *default_stream_ : *stream;
}

/// The lock is held.
void SoftwareCuda::take(std::uint64_t bytes, const std::string& what) {
  if (physical_bytes_ + bytes > options_.memory_bytes) {
    throw_cuda_error(what, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory");
  }
  physical_bytes_ += bytes;
  peak_physical_bytes_ = std::max(peak_physical_bytes_, physical_bytes_);
}

/// The lock is held.
void SoftwareCuda::give_up_where_unused(CudaMemory memory) {
  const auto found = memory_.find(memory);
  if (found->second.released && found->second.mapped == 0) {
    ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(memory),
                static_cast<off_t>(found->second.bytes));
    physical_bytes_ -= found->second.bytes;
    memory_.erase(found);
  }
}

/// The lock is held.
bool SoftwareCuda::is_accessible(Range range) const {
  const std::byte* at = range.data();
  const std::byte* const end = at + range.size();
  auto above = mapped_.upper_bound(at);
  if (above == mapped_.begin()) return false;
  for (auto each = std::prev(above); each != mapped_.end() && at < end; ++each) {
    if (!each->second.accessible || each->first > at) return false;
    at = each->first + each->second.bytes;
  }
  return at >= end;
}

void SoftwareCuda::expect_accessible(Range range) const {
  const std::lock_guard lock(mutex_);
  EXPECT_TRUE(is_accessible(range)) << "device memory is touched that is not mapped";
}

void SoftwareCuda::expect_untouched(Range range) {
  const std::lock_guard lock(mutex_);
  for (CUstream_st* stream : streams_) EXPECT_FALSE(stream->touches(range)) << "what is unmapped is still in use";
  EXPECT_FALSE(default_stream_->touches(range)) << "what is unmapped is still in use";
}

std::unique_ptr<Device> make_cuda_device_in_software(std::uint64_t capacity) {
  auto driver = std::make_shared<SoftwareCuda>(SoftwareCuda::Options{.memory_bytes = capacity, .granule_bytes = 4096});
  return std::make_unique<CudaDevice>(std::move(driver), capacity);
}

}  // namespace terrace
