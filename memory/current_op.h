/// The op or call of the session that the calling thread is in, so that what waits can be told.
///
/// Ops nest; beyond a depth that no program reaches they go by the name of those outside. Each thread has its own.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace terrace {

class CurrentOp {
 public:
  /// `name` lives for ever. Each call is followed by one of `leave`, on the same thread.
  static void enter(const char* name) noexcept {
    if (depth_ < names_.size()) {
      names_[depth_] = name;
    }
    ++depth_;
  }
  static void leave() noexcept { depth_ -= depth_ > 0 ? 1 : 0; }

  /// "" outside all ops.
  static const char* name() noexcept { return depth_ == 0 ? "" : names_[std::min(depth_, names_.size()) - 1]; }

 private:
  static inline thread_local std::array<const char*, 32> names_{};
  static inline thread_local std::size_t depth_ = 0;
};

/// What the calling thread does until this ends, beside the ops in it.
class OpScope {
 public:
  explicit OpScope(const char* name) noexcept { CurrentOp::enter(name); }
  ~OpScope() { CurrentOp::leave(); }
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;
};

}  // namespace terrace
