/// Real cases: a GPT that computes, or waits as long, with a session and in plain LibTorch, in one process.
#pragma once

#include <filesystem>

#include "tools/bench_case.h"

namespace terrace {

/// Where optimizer states rest. Parameters and gradients rest on the device.
enum class StatesRest : std::uint8_t { host, nvme };

/// Whether a step computes, or waits for so long as it would compute and leaves the cores free (see stand_in.h).
enum class Computation : std::uint8_t { real, waited };

/// Pairs of a managed and an unmanaged step of the same model, after two steps each whose losses must be equal bit for
/// bit. `options.target` is not used. With states on NVMe the host holds at most parameters, gradients and a quarter of
/// the states, and a step that does not move at least 8 B a parameter each way throws LogicError.
/// Throws what a session throws.
BenchCase run_real_case(StatesRest states, Computation computation, const std::filesystem::path& nvme,
                        PairOptions options);

}  // namespace terrace
