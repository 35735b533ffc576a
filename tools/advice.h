/// What to change about a stall.
#pragma once

#include <string>

#include "memory/stall.h"

namespace terrace {

struct RunFacts;

/// One sentence without its end, which names the setting and what it is now; empty where no setting would help.
std::string advice_on(StallCause cause, const RunFacts& facts);

}  // namespace terrace
