/// Which states an optimizer keeps of a parameter, by its name: what checkpoints of it hold. Each keeps a momentum, and
/// a master of what is not fp32.
#pragma once

#include <string_view>

namespace terrace {

inline constexpr std::string_view adamw_name = "AdamW";
inline constexpr std::string_view sgd_name = "SGD";

inline bool is_optimizer(std::string_view name) { return name == adamw_name || name == sgd_name; }

inline bool keeps_variance(std::string_view name) { return name == adamw_name; }

}  // namespace terrace
