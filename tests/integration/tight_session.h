/// What tests of single promises about a session share: a configuration in which a model of a few linear layers does
/// not fit the device, and a look at the error that something threw.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <terrace/terrace.h>
#include <torch/torch.h>

namespace terrace::testing {

constexpr std::uint64_t tight_chunk_bytes = 16 << 10;
/// A weight of this width, squared, fills a chunk: its bias lies in another one.
constexpr std::int64_t tight_width = 64;

/// Room for three chunks on the device, and for all of them on the host. One thread an op: they are tiny.
inline Config tight_config() {
  at::set_num_threads(1);
  Config config;
  config.device.memory = 4 << 20;
  config.device.chunks = 3 * tight_chunk_bytes;
  config.host.memory = 4 << 20;
  config.placement.chunk = tight_chunk_bytes;
  config.log.level = LogLevel::off;
  return config;
}

/// The LogicError that `call` throws, as text.
template <class Call>
std::string logic_error_of(Call&& call) {
  try {
    call();
  } catch (const LogicError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

template <class Call>
void expect_logic_error(const ::testing::Matcher<std::string>& text, Call&& call) {
  EXPECT_THAT(logic_error_of(std::forward<Call>(call)), text);
}

/// The session's last error, if it is an `Expected`.
template <class Expected>
std::optional<Expected> last_error_as(const Session& session) {
  if (session.last_error() == nullptr) {
    return std::nullopt;
  }
  try {
    std::rethrow_exception(session.last_error());
  } catch (const Expected& error) {
    return error;
  } catch (...) {
    return std::nullopt;
  }
}

}  // namespace terrace::testing
