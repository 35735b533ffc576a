/// The machine that a report was made on.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace terrace {

/// `threads`: of LibTorch.
nlohmann::ordered_json machine_json(int threads);

}  // namespace terrace
