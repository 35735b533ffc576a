#include "optimizer/instruction_set.h"

#include <string>

#include <gtest/gtest.h>

#include "optimizer/adamw.h"
#include "tests/base/noted.h"
#include "tests/optimizer/instruction_sets.h"

namespace terrace {
namespace {

TEST(InstructionSet, is_a_fallback_where_it_rounds_twice_and_only_there) {
  with_each_instruction_set([] {
    note_instruction_set();
    const std::string text = noted("kernels run with " + std::string(adamw_instruction_set()) + ",");
    EXPECT_EQ(text.find("no fused multiply-add") != std::string::npos, !adamw_uses_fma()) << text;
  });
}

}  // namespace
}  // namespace terrace
