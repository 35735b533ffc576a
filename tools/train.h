/// `terrace train`: trains, shows progress, and reports.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "base/config.h"

namespace terrace {

struct TrainOptions {
  Config config;
  std::filesystem::path config_file;       ///< that it is from; empty: none
  bool unmanaged = false;                  ///< plain LibTorch, all in memory
  bool json = false;                       ///< the report as JSON
  std::optional<std::int64_t> stop_after;  ///< steps; the learning rate's schedule stays that of train.steps
  std::int64_t evaluate = 0;               ///< held-out batches after training
  std::int64_t sample = 0;                 ///< bytes to generate after training
  std::string prompt;
  std::filesystem::path save;              ///< folder for a checkpoint at the end, and at an interrupt; empty: none.
                                           ///< One that holds a checkpoint has to be that of `resume`
  std::optional<std::int64_t> save_every;  ///< steps
  std::filesystem::path resume;            ///< folder of the checkpoint to go on from; empty: a new run
  std::filesystem::path metrics;           ///< one JSON object a step; empty: none
  std::filesystem::path timeline;          ///< what moved and waited, for a trace viewer; empty: none
  /// A folder for config.toml (sizes resolved), metrics.jsonl, sample.txt and report.json; empty: none.
  std::filesystem::path output;
};

/// Whether the run was completed; otherwise it was interrupted. The report goes to standard output, progress to
/// standard error. Throws terrace::Error and LibTorch's errors.
bool train(const TrainOptions& options);

}  // namespace terrace
