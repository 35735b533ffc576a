/// What a block keeps of its inputs in order to run again: a copy of each, and ways to find the tensors in it.
///
/// Found are tensors that are inputs, and those in tuples, pairs, optionals and containers, however nested. What
/// else holds a tensor (a struct, a pointer) is copied as it is.
#pragma once

#include <optional>
#include <ranges>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/util/OptionalArrayRef.h>

namespace terrace::block_detail {

/// False for what only refers to its elements, which would be gone when the block runs again.
template <class Value>
inline constexpr bool owns_its_elements = true;
template <class Element>
inline constexpr bool owns_its_elements<c10::ArrayRef<Element>> = false;
template <class Element>
inline constexpr bool owns_its_elements<c10::OptionalArrayRef<Element>> = false;
template <class Element, std::size_t extent>
inline constexpr bool owns_its_elements<std::span<Element, extent>> = false;
template <class Character>
inline constexpr bool owns_its_elements<std::basic_string_view<Character>> = false;

template <class Value>
concept TupleLike = requires {
  std::tuple_size<Value>::value;
};

template <class Value>
inline constexpr bool is_optional = false;
template <class Value>
inline constexpr bool is_optional<std::optional<Value>> = true;

/// Not vector<bool>, whose elements cannot be referred to, nor what is a range of itself, as paths are.
template <class Value>
concept Container = std::ranges::range<Value> && std::is_lvalue_reference_v<std::ranges::range_reference_t<Value>> &&
                    !std::is_same_v<std::ranges::range_value_t<Value>, Value> &&
                    !std::is_arithmetic_v<std::ranges::range_value_t<Value>>;

/// Calls `visit(at::Tensor&)` for every defined tensor in `value`.
template <class Value, class Visit>
void for_each_tensor(Value& value, Visit&& visit) {
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    if (value.defined()) {
      visit(value);
    }
  } else if constexpr (TupleLike<Value>) {
    std::apply([&](auto&... parts) { (for_each_tensor(parts, visit), ...); }, value);
  } else if constexpr (is_optional<Value>) {
    if (value) {
      for_each_tensor(*value, visit);
    }
  } else if constexpr (Container<Value>) {
    for (auto& element : value) {
      for_each_tensor(element, visit);
    }
  }
}

/// What was given as an `Input` and kept by value, as the same kind of reference again.
template <class Input>
decltype(auto) as_given(std::decay_t<Input>& kept) {
  if constexpr (std::is_same_v<std::remove_cvref_t<Input>, std::decay_t<Input>>) {
    return static_cast<Input&&>(kept);
  } else {
    return (kept);  // an array or a function, which decayed
  }
}

}  // namespace terrace::block_detail
