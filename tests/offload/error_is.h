/// Whether an error is exactly of a type, and what it says where it is not.
#pragma once

#include <exception>
#include <typeinfo>

#include <gtest/gtest.h>

namespace terrace {

template <class Expected>
testing::AssertionResult is(const std::exception_ptr& error) {
  if (!error) return testing::AssertionFailure() << "no error";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& found) {
    const bool same = typeid(found) == typeid(Expected);
    return (same ? testing::AssertionSuccess() : testing::AssertionFailure()) << found.what();
  }
}

}  // namespace terrace
