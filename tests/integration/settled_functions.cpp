// A plain run, which is what others are compared with, may be the first of a test program to compute.

#include <gtest/gtest.h>

#include "integration/vector_functions.h"

namespace terrace::testing {
namespace {

class SettledFunctions : public ::testing::Environment {
 public:
  void SetUp() override { settle_vector_functions(); }
};

[[maybe_unused]] const auto* const environment = ::testing::AddGlobalTestEnvironment(new SettledFunctions);

}  // namespace
}  // namespace terrace::testing
