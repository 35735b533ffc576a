#pragma once

#include <map>
#include <string>

namespace terrace {

/// What a program keeps with a checkpoint for itself, such as its step and its data's position. UTF-8 text.
using CheckpointNotes = std::map<std::string, std::string>;

}  // namespace terrace
