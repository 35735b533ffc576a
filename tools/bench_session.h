/// What the cases of `terrace bench step` do around a session.
#pragma once

#include <exception>
#include <thread>
#include <utility>

#include <ATen/Parallel.h>

#include "base/config.h"
#include "base/error.h"
#include "base/memory_info.h"
#include "integration/memory_plan.h"
#include "integration/rates.h"
#include "integration/session.h"
#include "offload/emulated_device.h"

namespace terrace {

inline double hardware_cores() { return static_cast<double>(std::thread::hardware_concurrency()); }

/// How a session on an emulated device of that memory divides it and the other tiers' up.
inline MemoryPlan plan_of(const Config& config) {
  return plan_memory(config, *config.device.memory, EmulatedDevice(1).slot_bytes(1), available_memory_bytes(),
                     RatesFile().load());
}

/// Ops throw LibTorch's errors; why they failed is with the session.
template <class Function>
auto with_typed_errors(Session& session, Function&& function) {
  try {
    return function();
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    if (session.last_error()) std::rethrow_exception(session.last_error());
    throw;
  }
}

/// As many threads as said, for as long as it lives.
class ThreadsOfLibTorch {
 public:
  explicit ThreadsOfLibTorch(int threads) : before_(at::get_num_threads()) { at::set_num_threads(threads); }
  ~ThreadsOfLibTorch() { at::set_num_threads(before_); }
  ThreadsOfLibTorch(const ThreadsOfLibTorch&) = delete;
  ThreadsOfLibTorch& operator=(const ThreadsOfLibTorch&) = delete;

 private:
  const int before_;
};

}  // namespace terrace
