// What holds for every test of a session.

#include <cstdlib>

#include <gtest/gtest.h>

#include "integration/vector_functions.h"

namespace terrace::testing {
namespace {

class TestEnvironment : public ::testing::Environment {
 public:
  void SetUp() override {
    // A plain run, which is what others are compared with, may be the first of a test program to compute.
    settle_vector_functions();
    // Nothing is kept from one run for another, but where a test says so.
    ::unsetenv("XDG_CACHE_HOME");
    ::unsetenv("HOME");
  }
};

[[maybe_unused]] const auto* const environment = ::testing::AddGlobalTestEnvironment(new TestEnvironment);

}  // namespace
}  // namespace terrace::testing
