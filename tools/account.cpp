#include "tools/account.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "tools/advice.h"

namespace terrace {
namespace {

constexpr double kLittle = 0.05;  // of the time

std::string spent_on(StallCause cause) {
  switch (cause) {
    case StallCause::nvme_to_host:
      return "waiting for bytes from NVMe";
    case StallCause::host_to_device:
      return "waiting for bytes on their way to the device";
    case StallCause::device_to_host:
      return "waiting for bytes on their way from the device";
    case StallCause::device_room:
      return "waiting for room on the device";
    case StallCause::host_room:
      return "waiting for room on the host";
    case StallCause::nvme_room:
      return "waiting for room on NVMe";
    case StallCause::update:
      break;
  }
  return "on updates, or waiting for them";
}

std::string percent(double share) { return std::to_string(std::lround(100 * share)) + "% of the time was spent "; }

}  // namespace

Account account_of(const RunFacts& facts) {
  Account account;
  account.seconds = facts.seconds;
  account.update_seconds = facts.update_seconds;
  account.stall_seconds_by_cause = facts.stall_seconds_by_cause;

  std::array<double, stall_cause_count> parts = facts.stall_seconds_by_cause;
  parts[index_of(StallCause::update)] += facts.update_seconds;
  const double rest = std::accumulate(parts.begin(), parts.end(), 0.0);
  account.computation_seconds = std::max(facts.seconds - rest, 0.0);
  if (account.share_of(rest) < kLittle) {
    account.bound = "computation";
    account.reason = percent(account.share_of(account.computation_seconds)) + "on it";
    return account;
  }
  const auto most = std::max_element(parts.begin(), parts.end());
  const StallCause cause = all_stall_causes[static_cast<std::size_t>(most - parts.begin())];
  account.bound = name_of(cause);
  account.reason = percent(account.share_of(*most)) + spent_on(cause);
  account.suggestion = advice_on(cause, facts);
  return account;
}

}  // namespace terrace
