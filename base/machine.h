/// The machine that this process runs on.
#pragma once

#include <cstdint>
#include <string>

namespace terrace {

/// As the system names the processor; empty where it does not.
std::string cpu_model();

/// Hardware threads that are there, whoever may use them.
std::int64_t machine_threads();

/// All of the machine's memory, whoever may use it.
std::uint64_t machine_memory_bytes();

}  // namespace terrace
