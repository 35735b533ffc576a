/// What becomes of the calls of blocks with `placement.activations = "auto"`: which run again in backward.
///
/// What is saved stays on the device as long as there is room, and otherwise leaves it and comes back (see
/// OffloadedActivations); who leaves is up to residency. The first steps run so. In one of them each call is measured:
/// how long it computes, what it saves, how long it waits. Where activations have left and were waited for, a plan is
/// made (see activation_plan.h) of which calls run again instead. It is kept if the fastest of the steps after it is no
/// slower than the fastest of those before. The log says all of that.
///
/// A call that runs again needs the room that it needed at first, beside the gradients that backward holds by then. So
/// only those do with which the step stays within the device's budget for certain, and only while they are given no
/// more bytes than when they were measured.
///
/// Steps whose number of calls differs from the one before are not measured, and for passes within a step that differ
/// from each other there is no plan. A program that changes later keeps its plan, by the position of calls in a pass.
///
/// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "integration/block_call.h"
#include "memory/activation_plan.h"
#include "memory/usage.h"

namespace terrace {

enum class BlockActivations : std::uint8_t { keep, offload, recompute };

/// What was planned, beside what was measured. Bytes are those of activations that leave the device in a step.
struct ActivationReport {
  std::vector<BlockActivations> blocks;  ///< of each call in a pass; offload: at least half of what it saves leaves
  std::uint64_t saved_bytes = 0;         ///< by a pass where nothing runs again, with what blocks read
  double seconds_before = 0;             ///< of the fastest step where nothing ran again
  std::uint64_t bytes_before = 0;
  double predicted_seconds = 0;
  std::uint64_t predicted_bytes = 0;
  /// Nothing until steps with the plan have run.
  std::optional<double> measured_seconds{};
  std::optional<std::uint64_t> measured_bytes{};
  bool is_dropped = false;  ///< it was slower, and nothing runs again
};

class ActivationPlanner final : public BlockPlanner {
 public:
  /// `usage` is called on any thread, for as long as this lives.
  explicit ActivationPlanner(std::function<MemoryUsage()> usage) : usage_(std::move(usage)) {}

  /// A step of the program ends.
  void end_step();
  /// Nothing where no step was measured yet.
  std::optional<ActivationReport> report() const;

  // BlockPlanner
  Decision begin_call(std::uint64_t given_bytes) override;

 private:
  enum class Stage : std::uint8_t { watching, measuring, trying, settled };

  struct PlannedCall {
    bool runs_again = false;
    std::uint64_t given_bytes = 0;  ///< and no more
  };

  class Call;
  struct Pass;
  struct Measured;

  /// The passes of the step, if all were alike and went to their ends.
  std::optional<Measured> measured() const;
  void make_plan(Measured seen, const MemoryUsage& usage, std::uint64_t left_bytes);
  void judge_plan();

  const std::function<MemoryUsage()> usage_;
  mutable std::mutex mutex_;
  Stage stage_ = Stage::watching;
  std::size_t calls_ = 0;         ///< in this step
  std::size_t calls_before_ = 0;  ///< in the last one
  int steps_ = 0;                 ///< alike, since the stage before ended
  double fastest_seconds_ = 0;    ///< of those, but for the first
  std::int64_t step_began_ns_ = 0;
  std::uint64_t left_before_ = 0;              ///< the device, since the session began, when the step did
  std::vector<std::shared_ptr<Pass>> passes_;  ///< of the step that is measured
  std::vector<PlannedCall> plan_;              ///< by position in a pass; empty: nothing runs again
  std::optional<ActivationReport> report_;
};

}  // namespace terrace
