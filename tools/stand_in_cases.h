/// Stand-in cases: the whole product under a model whose computation is only waited for, so that cores are free and
/// overlap can be near perfect.
#pragma once

#include <filesystem>

#include "tools/bench_case.h"

namespace terrace {

struct StandInCase {
  Bound bound = Bound::compute;
  double nvme_share = 0;  ///< of the parameters: rests on NVMe, the others on the host
  int micro_batches = 1;
  bool clips = false;  ///< gradients, by their norm
};

/// Chooses the compute time and the rates of link and drive (see paced_engine.h), within what was measured here, so
/// that the bound holds, then measures steps against the floor in pairs; chooses anew when the machine has become
/// slower than that. `options.target` is not used. Gradients rest in `nvme`, states on the host: states can change only
/// between step() and forward, so that no step in which NVMe has to move them can be near its largest term alone (the
/// real case on NVMe has them there). Uses one thread of LibTorch. Throws what a session throws.
BenchCase run_stand_in_case(const StandInCase& which, const std::filesystem::path& nvme, PairOptions options);

}  // namespace terrace
