/// What the transfer service's tests have in common. Every test runs with each engine that this system has, and some
/// with the CUDA device, on a driver in software.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "offload/emulated_device.h"
#include "offload/transfer_service.h"
#include "offload/uring_engine.h"
#include "tests/base/temporary_folder.h"
#include "tests/offload/engine_by_name.h"
#include "tests/offload/fault_injecting_engine.h"
#include "tests/offload/software_cuda.h"

namespace terrace {

using Direction = FaultInjectingEngine::Direction;
using enum TransferPriority;

inline constexpr auto device = Tier::device;
inline constexpr auto host = Tier::host;
inline constexpr auto nvme = Tier::nvme;

inline constexpr std::size_t granule = 8192;
inline constexpr std::size_t many_blocks = 21;
/// The last block is a partial one, of more than half a page: bits flip in the first half.
inline constexpr std::uint64_t many_bytes = (many_blocks - 1) * granule + 3000;
inline constexpr std::size_t guard_bytes = 64;

inline std::vector<std::byte> pattern(std::uint64_t stamp, std::uint64_t bytes) {
  std::vector<std::byte> result(bytes);
  std::uint64_t word = stamp * 0x9e3779b97f4a7c15;
  for (std::byte& each : result) each = static_cast<std::byte>((word = word * 6364136223846793005 + stamp) >> 56);
  return result;
}

/// What a transfer has reported so far.
class Outcome {
 public:
  void done(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    ++times_done_;
    error_ = std::move(error);
    changed_.notify_all();
  }
  void write_failed(ExtentId extent, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(times_done_, 0) << "write_failed comes before done";
    EXPECT_NE(error, nullptr);
    failed_writes_.push_back(extent);
  }

  /// Throws the transfer's error.
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return times_done_ > 0; });
    if (error_) std::rethrow_exception(error_);
  }
  bool succeeded() {
    try {
      wait();
    } catch (const std::exception& error) {
      return false;
    }
    return true;
  }

  int times_done() const {
    const std::lock_guard lock(mutex_);
    return times_done_;
  }
  std::vector<ExtentId> failed_writes() const {
    const std::lock_guard lock(mutex_);
    return failed_writes_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int times_done_ = 0;
  std::exception_ptr error_;
  std::vector<ExtentId> failed_writes_;
};

class Recorder final : public TransferObserver {
 public:
  void on_transfer(const TransferRecord& record) noexcept override {
    const std::lock_guard lock(mutex_);
    records_.push_back(record);
  }
  std::vector<TransferRecord> records() const {
    const std::lock_guard lock(mutex_);
    return records_;
  }
  void forget_all_but(std::size_t count) {
    const std::lock_guard lock(mutex_);
    records_.resize(count);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<TransferRecord> records_;
};

inline std::unique_ptr<Device> make_device(const std::string& name) {
  constexpr std::uint64_t capacity = 64 << 20;
  if (name == "cuda") return make_cuda_device_in_software(capacity);
  return std::make_unique<EmulatedDevice>(capacity);
}

inline std::string named_by_engine(const testing::TestParamInfo<const char*>& engine) { return engine.param; }

/// A service over real parts, objects with room on every tier, and what each transfer has reported.
class TransferServiceTest : public testing::TestWithParam<const char*> {
 protected:
  /// Room for some bytes on all tiers at once.
  struct Object {
    std::uint64_t bytes;
    TransferPlaces places;
  };

  void SetUp() override {
    std::string why_not;
    if (GetParam() == std::string("io_uring") && !UringEngine::available(&why_not)) GTEST_SKIP() << why_not;
    engine_.emplace(make_engine(GetParam()));
    service_.emplace(device_, arena_, &store_, &*engine_, TransferService::Options{.observer = &recorder_});
  }
  void TearDown() override {
    service_.reset();
    for (const Outcome& outcome : outcomes_) EXPECT_EQ(outcome.times_done(), 1);
    EXPECT_EQ(recorder_.records().size(), outcomes_.size());
    for (const Object& object : objects_) device_.unmap_slot(object.places.device, object.bytes + guard_bytes);
  }

  Object& object(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto blocks = static_cast<std::size_t>((bytes + granule - 1) / granule);
    Object& object = objects_.emplace_back(bytes, TransferPlaces{.device = device_.map_slot(bytes + guard_bytes),
                                                                 .host = arena_.allocate(blocks),
                                                                 .nvme = store_.reserve(blocks)});
    wipe(object);
    return object;
  }
  /// Of what is on the device and the host nothing remains.
  static void wipe(Object& object) {
    std::memset(object.places.device, 0xee, object.bytes + guard_bytes);
    for (std::byte* block : object.places.host) std::memset(block, 0xee, granule);
  }

  TransferRequest request(const Object& object, Tier from, Tier to, TransferPriority priority = demand) {
    TransferRequest request;
    request.from = from;
    request.to = to;
    request.kind = Kind::master;
    request.bytes = object.bytes;
    request.priority = priority;
    request.prepare = [places = object.places] { return places; };
    return request;
  }
  Outcome& start(TransferRequest request, TransferId* id = nullptr) {
    Outcome* outcome = nullptr;
    {
      const std::lock_guard lock(mutex_);
      outcome = &outcomes_.emplace_back();
    }
    request.done = [outcome, then = std::move(request.done)](std::exception_ptr error) {
      if (then) then(error);
      outcome->done(std::move(error));
    };
    request.write_failed = [outcome](ExtentId extent, std::exception_ptr error) {
      outcome->write_failed(extent, std::move(error));
    };
    const TransferId started = service_->start(std::move(request));
    if (id != nullptr) *id = started;
    return *outcome;
  }
  Outcome& start(const Object& object, Tier from, Tier to, TransferPriority priority = demand) {
    return start(request(object, from, to, priority));
  }
  void move(const Object& object, Tier from, Tier to) { start(object, from, to).wait(); }

  static void for_each_block(const Object& object,
                             const std::function<void(std::byte*, std::uint64_t, std::size_t)>& f) {
    for (std::size_t i = 0; i < object.places.host.size(); ++i) {
      f(object.places.host[i], i * granule,
        static_cast<std::size_t>(std::min<std::uint64_t>(granule, object.bytes - i * granule)));
    }
  }
  void put(Object& object, Tier tier, std::uint64_t stamp) {
    const std::vector<std::byte> bytes = pattern(stamp, object.bytes);
    if (tier == device) {
      std::memcpy(object.places.device, bytes.data(), bytes.size());
      return;
    }
    for_each_block(object, [&](std::byte* block, std::uint64_t offset, std::size_t length) {
      std::memcpy(block, bytes.data() + offset, length);
    });
    if (tier == nvme) {
      move(object, host, nvme);
      wipe(object);
    }
  }
  std::vector<std::byte> get(Object& object, Tier tier) {
    std::vector<std::byte> bytes(object.bytes);
    if (tier == device) {
      std::memcpy(bytes.data(), object.places.device, bytes.size());
      return bytes;
    }
    if (tier == nvme) {
      wipe(object);
      move(object, nvme, host);
    }
    for_each_block(object, [&](std::byte* block, std::uint64_t offset, std::size_t length) {
      std::memcpy(bytes.data() + offset, block, length);
    });
    return bytes;
  }
  static bool guard_is_untouched(const Object& object) {
    return std::all_of(object.places.device + object.bytes, object.places.device + object.bytes + guard_bytes,
                       [](std::byte each) { return each == std::byte{0xee}; });
  }

  std::uint64_t moved(Link link, Kind kind = Kind::master) const {
    return service_->moved()[index_of(link)][index_of(kind)];
  }
  /// Operations of that direction on that block of an object suffer the fault.
  void inject(Direction direction, const Object& object, std::size_t block, Fault fault) {
    const std::string where = store_.describe(object.places.nvme[block]);
    engine_->heal();
    engine_->inject({.fault = fault, .direction = direction, .when = [where](const IoOperation& operation) {
                       return where == operation.file->path.string() + ", offset " + std::to_string(operation.offset);
                     }});
  }

  TemporaryFolder folder_;
  std::unique_ptr<Device> owned_device_ = make_device(GetParam());
  Device& device_ = *owned_device_;
  HostArena arena_{granule, 1024};
  NvmeStore store_{{folder_.path()}, extent_file_bytes(granule, 1024), granule};
  Recorder recorder_;
  std::optional<FaultInjectingEngine> engine_;
  std::optional<TransferService> service_;
  std::mutex mutex_;
  std::deque<Object> objects_;
  std::deque<Outcome> outcomes_;
};

struct Ends {
  Tier from;
  Tier to;
};
inline constexpr std::array<Ends, 6> routes{
    {{host, device}, {device, host}, {host, nvme}, {nvme, host}, {nvme, device}, {device, nvme}}};

}  // namespace terrace
