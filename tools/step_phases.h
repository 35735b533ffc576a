/// What a stand-in's step cannot do without, phase by phase.
///
/// A step is the update with the first forward, its backward, and then a forward and a backward for each further
/// micro-batch. What a phase needs can be moved in no other, but for parameters that the device, and parameters and
/// gradients that the host, has room to keep over the turn between two, at which the order of use reverses: nothing of
/// an update begins before step(), the first forward uses what the update makes, and gradients leave the device in the
/// backward that makes them. As far as that is so, a step takes no less than the sum over its phases of each one's
/// largest term, which may be well above the largest term of the whole. The last of these is a choice: gradients that
/// the device keeps over a turn move in the next phase, or between device and host alone. Terrace keeps some for the
/// update, and so may do with less; tools/least_step tells what any order of transfers could. Pure.
#pragma once

#include <vector>

#include "tools/bench_case.h"

namespace terrace {

/// Bytes.
struct StandInMemory {
  double parameters = 0;   ///< all of them; their gradients, which rest on NVMe, take as many
  double device_room = 0;  ///< for parameters that stay there over a turn
  double host_room = 0;    ///< beside what rests there
  double nvme_share = 0;   ///< of the parameters: what rests on NVMe; the others rest on the host
  int micro_batches = 1;
};

struct StepPhase {
  double compute_share = 0;
  LinkBytes bytes{};
  bool updates = false;
};

/// In their order.
std::vector<StepPhase> phases_of_step(const StandInMemory& memory);

LinkBytes bytes_of(const std::vector<StepPhase>& phases);

/// Seconds, given those of the whole step by term: each phase takes its largest part of one.
double phased_floor_seconds(const std::vector<StepPhase>& phases, const Terms& terms);

}  // namespace terrace
