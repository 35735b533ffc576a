/// What `terrace inspect` found, as a table for people and as JSON for programs.
#pragma once

#include <string>

#include "tools/inspection.h"

namespace terrace {

std::string to_text(const Inspection& found);
std::string to_json(const Inspection& found);

}  // namespace terrace
