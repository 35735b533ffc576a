/// Runs a test with each instruction set that was compiled in and that this CPU has.
#pragma once

#include <cstdint>
#include <functional>

#include <gtest/gtest.h>
#include <hwy/targets.h>

namespace terrace {

inline void with_each_instruction_set(const std::function<void()>& test) {
  struct Restore {
    ~Restore() { select(0); }
    static void select(std::int64_t targets) {  // 0: what the CPU has
      hwy::SetSupportedTargetsForTest(targets);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    }
  } restore;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    Restore::select(target);
    SCOPED_TRACE(hwy::TargetName(target));
    test();
  }
}

}  // namespace terrace
