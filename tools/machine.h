/// The machine that a report was made on.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json_fwd.hpp>

namespace terrace {

/// As the system names the processor; empty where it does not.
std::string cpu_model();

/// All of the machine's, whoever may use it.
std::uint64_t machine_memory_bytes();

/// `threads`: of LibTorch.
nlohmann::ordered_json machine_json(int threads);

}  // namespace terrace
