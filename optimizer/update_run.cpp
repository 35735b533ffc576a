#include "optimizer/update_run.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace terrace {

void require_updatable(const UpdateRun& run, bool keeps_variance) {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw LogicError(std::string("optimizer: an update of a run ") + what);
  };
  require(run.parameter_type != ElementType::float16, "of float16 parameters, which are not updated");
  if (run.count == 0) {
    return;
  }
  require(run.parameter != nullptr, "without parameters");
  require(run.gradient != nullptr, "without gradients");
  require(run.momentum != nullptr, "without a momentum");
  require(!keeps_variance || run.variance != nullptr, "without a variance");
  require(run.master != nullptr || master_bytes(run.states, run.parameter_type) == 0,
          "of bfloat16 parameters without a master");
}

void require_counted(std::int64_t step) {
  if (step < 1) throw LogicError("optimizer: step " + std::to_string(step) + " of an update, which count from 1");
}

UpdateRun part_of(const UpdateRun& run, std::size_t first, std::size_t count) {
  const auto at = [&](void* array, std::size_t element_bytes) -> void* {
    return array == nullptr ? nullptr : static_cast<std::byte*>(array) + first * element_bytes;
  };
  const std::size_t moment_bytes = bytes_of(moment_type(run.states));
  UpdateRun part = run;
  part.parameter = at(run.parameter, bytes_of(run.parameter_type));
  part.gradient = static_cast<const std::byte*>(run.gradient) + first * bytes_of(run.gradient_type);
  part.master = at(run.master, master_bytes(run.states, run.parameter_type));
  part.momentum = at(run.momentum, moment_bytes);
  part.variance = at(run.variance, moment_bytes);
  part.count = count;
  return part;
}

void for_each_part(const UpdateRun& run, const UpdateThreads& threads,
                   const std::function<void(const UpdateRun&)>& update) {
  constexpr std::size_t most = update_part_elements;
  threads.for_each((run.count + most - 1) / most,
                   [&](std::size_t i) { update(part_of(run, i * most, std::min(most, run.count - i * most))); });
}

}  // namespace terrace
