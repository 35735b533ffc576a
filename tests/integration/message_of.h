#pragma once

#include <functional>
#include <string>

#include <gtest/gtest.h>

namespace terrace::testing {

/// What the call throws of type E.
template <class E>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "threw another error: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "threw nothing";
  return "";
}

}  // namespace terrace::testing
