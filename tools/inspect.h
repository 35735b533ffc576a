/// `terrace inspect`: shows what a run with a configuration would use on this machine, without training.
#pragma once

#include "base/config.h"

namespace terrace {

struct InspectOptions {
  Config config;
  bool probe = false;  ///< measures rates, and keeps them
  bool json = false;   ///< the report as JSON
};

/// Whether it was completed; otherwise it was interrupted. The report goes to standard output. Throws what a run would
/// throw when it begins. Leaves nothing but the rates: no file, and no folder that was not there.
bool inspect(const InspectOptions& options);

}  // namespace terrace
