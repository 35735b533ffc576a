/// The files that `terrace train` is given.
#pragma once

#include "tools/train.h"

namespace terrace {

/// Throws ConfigError, by their options, where the run would write to a file that it reads from, that a checkpoint is
/// made of, or that it writes for something else or prints to. What is no file, such as /dev/null, may be given often;
/// a run may go by its own config.toml; and what looks like an earlier run's may lie among its texts.
void require_files_of_their_own(const TrainOptions& options);

}  // namespace terrace
