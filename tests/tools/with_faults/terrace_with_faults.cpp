/// The `terrace` command on a drive that does wrong:
///
///     terrace_with_faults FAULT DIRECTION NTH ARGUMENTS...
///
/// FAULT: EIO, ENOSPC, short or flip, which happens once, or lasting-EIO, ... to everything from then on, or none.
/// DIRECTION: read or write. NTH: among its operations, from 0. Standard error tells how many operations there were
/// ("operations: R reads, W writes"), and of the first fault where and at what time it happened ("fault: at SECONDS
/// PATH OFFSET").

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "offload/choose_engine.h"
#include "tests/offload/fault_injecting_engine.h"
#include "tools/command.h"

namespace terrace {
namespace {

using Direction = IoOperation::Direction;

struct Plan {
  std::optional<Fault> fault;
  bool lasts = false;
  Direction direction = Direction::read;
  std::uint64_t nth = 0;
};

Plan plan_of(char** words) {
  const std::map<std::string, Fault> faults{{"EIO", Fault::io_error},
                                            {"ENOSPC", Fault::no_space},
                                            {"short", Fault::short_transfer},
                                            {"flip", Fault::flipped_bit}};
  Plan plan;
  std::string name = words[0];
  if (name.starts_with("lasting-")) {
    plan.lasts = true;
    name.erase(0, name.find('-') + 1);
  }
  if (name != "none") plan.fault = faults.at(name);
  plan.direction = words[1] == std::string("read") ? Direction::read : Direction::write;
  plan.nth = std::strtoull(words[2], nullptr, 10);
  return plan;
}

/// Called for one operation at a time.
class Rule {
 public:
  explicit Rule(const Plan& plan) : plan_(plan) {}

  bool operator()(const IoOperation& operation) {
    ++(operation.direction == Direction::read ? reads : writes);
    if (!plan_.fault || operation.direction != plan_.direction) return false;
    const std::uint64_t number = count_++;
    if (number == plan_.nth) {
      const auto now = std::chrono::system_clock::now().time_since_epoch();
      std::fprintf(stderr, "fault: at %.3f %s %llu\n", std::chrono::duration<double>(now).count(),
                   operation.file->path.c_str(), static_cast<unsigned long long>(operation.offset));
    }
    return plan_.lasts ? number >= plan_.nth : number == plan_.nth;
  }

  std::uint64_t reads = 0;
  std::uint64_t writes = 0;

 private:
  const Plan plan_;
  std::uint64_t count_ = 0;
};

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  constexpr int words = 3;
  if (argc < 1 + words) {
    std::fprintf(stderr, "usage: terrace_with_faults FAULT DIRECTION NTH ARGUMENTS...\n");
    return 2;
  }
  const terrace::Plan plan = terrace::plan_of(argv + 1);
  terrace::Rule rule(plan);
  terrace::decorate_io_engines([&](std::unique_ptr<terrace::IoEngine> engine) {
    auto decorated = std::make_unique<terrace::FaultInjectingEngine>(std::move(engine));
    decorated->inject({.fault = plan.fault.value_or(terrace::Fault::io_error), .when = std::ref(rule)});
    return decorated;
  });
  argv[words] = argv[0];
  const int code = terrace::run_command(argc - words, argv + words);
  std::fprintf(stderr, "operations: %llu reads, %llu writes\n", static_cast<unsigned long long>(rule.reads),
               static_cast<unsigned long long>(rule.writes));
  return code;
}
