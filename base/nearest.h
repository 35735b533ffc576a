/// Finds what somebody meant to type.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace terrace {

/// How many characters to insert, delete, replace, or swap with their neighbour, turn `from` into `to`.
std::size_t edit_distance(std::string_view from, std::string_view to);

/// The candidate nearest to a dotted name such as "device.memroy"; the first of several, empty if there are none.
/// The last part weighs most: "train.layers" is near to "model.layers".
std::string nearest_name(std::string_view name, std::span<const std::string> candidates);

}  // namespace terrace
