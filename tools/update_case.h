/// One case of `terrace bench update`: the update of a model whose states rest on NVMe, against what the drive and
/// memory take for the same bytes, and behind computation that is only waited for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "optimizer/adamw.h"
#include "tools/paired.h"

namespace terrace {

/// A model and what is kept beside it.
struct UpdateSetting {
  std::string name;
  ElementType type = ElementType::float32;  ///< of parameters and gradients
  std::string states;                       ///< as `optimizer.states` has it
  std::int64_t layers = 0;                  ///< of a stand-in GPT
  std::filesystem::path folder{};
};

/// What of an update is hidden behind computation.
struct HiddenUpdate {
  double with_seconds = 0;  ///< medians, a step
  double without_seconds = 0;
  double compute_over_update = 0;  ///< the same with either
  Interval hidden;                 ///< 1 - (with - without) / the update alone, by pairs
  std::size_t pairs = 0;
  Verdict verdict = Verdict::none;
};

struct UpdateCase {
  UpdateSetting setting;
  std::uint64_t parameters = 0;
  std::uint64_t state_bytes = 0;
  std::uint64_t host_bytes = 0;  ///< the budget
  std::size_t block_bytes = 0;
  std::size_t depth = 0;  ///< blocks with the drive at once, each way
  int threads = 0;        ///< of the update's arithmetic
  double read_bytes = 0;  ///< an update
  double written_bytes = 0;
  double seconds = 0;  ///< medians; of the update alone
  double nvme_floor_seconds = 0;
  double dram_floor_seconds = 0;
  double together_seconds = 0;    ///< of both loops at once, in step, beside a thread that takes the checksums
  Interval fraction;              ///< the larger floor over the update, by pairs
  Interval fraction_of_together;  ///< `together_seconds` over the update, by pairs
  std::size_t pairs = 0;
  Verdict verdict = Verdict::none;
  HiddenUpdate behind_forward;  ///< which is as long as the update, or a little longer
  HiddenUpdate behind_step;     ///< forward and backward, together so long
};

inline constexpr double update_fraction_target = 0.90;
inline constexpr double update_hidden_target = 0.95;
inline constexpr double update_compute_share = 1.1;  ///< of the update, that computation takes

/// Measures in pairs. Parameters and gradients rest on the host, states on NVMe but for what the host has room for
/// beside them. Uses one thread of LibTorch, so that updates run in the background. What was measured when
/// `options.stop` says so counts; `options.target` is not used. Throws what a session throws, and OutOfMemory where the
/// machine has not the memory for it.
UpdateCase measure_update(const UpdateSetting& setting, const PairOptions& options);

}  // namespace terrace
