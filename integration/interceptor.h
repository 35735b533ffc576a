/// Sees every op before it runs, and has its managed operands pinned while it does.
///
/// An `at::RecordFunction` callback, installed once and never removed. Only ops that read or write bytes
/// pin: views do not, and composite ops are left to the ops that they are made of, but for those that read by pointer
/// too. Of a sparse tensor its parts are operands. Nothing happens under `Pause`, nor while no pinner is attached.
#pragma once

#include <memory>
#include <span>

#include <ATen/record_function.h>

#include "integration/managed_storage.h"

namespace terrace {

/// One managed operand of an op.
struct OpOperand {
  ManagedStorage* storage;
  bool writes;
};

class OpPinner {
 public:
  virtual ~OpPinner() = default;
  /// Pins the operands for as long as the returned object lives. Where that fails the storages that are closed stay so
  /// for as long, with the reason as what access throws. `inputs` are all that the op is given.
  virtual std::unique_ptr<at::ObserverContext> pin(std::span<const OpOperand> operands,
                                                   c10::ArrayRef<const c10::IValue> inputs) noexcept = 0;
};

/// Sends ops to `pinner`, from all threads.
void attach_interceptor(OpPinner& pinner);
void detach_interceptor() noexcept;

/// While one lives, ops do not even come by here, so that what it costs them can be measured. Not beside ops of other
/// threads. Only once a pinner was attached.
class InterceptionOff {
 public:
  InterceptionOff();
  ~InterceptionOff();
  InterceptionOff(const InterceptionOff&) = delete;
  InterceptionOff& operator=(const InterceptionOff&) = delete;
};

}  // namespace terrace
