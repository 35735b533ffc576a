/// A run of elements and what is kept of them: what the arithmetic of an optimizer works on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "optimizer/element_type.h"
#include "optimizer/state_format.h"
#include "optimizer/update_threads.h"

namespace terrace {

/// Each array has `count` elements, of the types that `states` says. They do not overlap, and need the alignment of
/// their element type only.
///
/// Beside a bf16 parameter there is a master. A whole one that differs, once rounded, from its parameter by its bits
/// starts from the parameter, which somebody else has written. So a master of zeros initialises itself, as do lower
/// halves. The parameter is written as the rounded master.
struct UpdateRun {
  ElementType parameter_type;  ///< float32 or bfloat16
  ElementType gradient_type;
  StateFormat states;
  void* parameter;       ///< read and written
  const void* gradient;  ///< read
  void* master;          ///< read and written; null where the parameter is fp32
  void* momentum;        ///< read and written
  void* variance;        ///< read and written; may be null for an optimizer that keeps none
  std::size_t count;
};

/// Throws LogicError where the run lacks what an update needs: a parameter or state without its array, a parameter type
/// that is not updated.
void require_updatable(const UpdateRun& run, bool keeps_variance);

/// Throws LogicError unless `step` counts from 1.
void require_counted(std::int64_t step);

/// The run's elements from `first` on, `count` of them.
UpdateRun part_of(const UpdateRun& run, std::size_t first, std::size_t count);

/// What threads share out, in elements: enough that asking for more is cheap, little enough that a small run occupies
/// all threads.
inline constexpr std::size_t update_part_elements = 32768;

/// Calls `update` for the parts of the run, on several threads. It must not throw.
void for_each_part(const UpdateRun& run, const UpdateThreads& threads,
                   const std::function<void(const UpdateRun&)>& update);

}  // namespace terrace
