/// The files that `terrace train` is given.
#pragma once

#include "tools/train.h"

namespace terrace {

/// Throws ConfigError, by their options, where the run would write to a file that it reads from, or that it writes for
/// something else. What is no file, such as /dev/null, may be given often, and a run may go by its own config.toml.
void require_files_of_their_own(const TrainOptions& options);

}  // namespace terrace
