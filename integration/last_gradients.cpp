#include "integration/last_gradients.h"

#include "integration/session_state.h"

namespace terrace {

void LastGradients::begin_step(std::span<ManagedParameter* const> trained) {
  for (auto& [set, count] : counts_) {
    count = {.now = 0, .last_one = count.now > 0 ? count.now : count.last_one};
  }
  for (ManagedParameter* const parameter : trained) {
    if (!parameter->before_accumulation) {
      watched_.insert(parameter->number);
      parameter->before_accumulation = [this, parameter] { count(parameter->chunk_set); };
    }
  }
}

void LastGradients::end(SessionState& state) {
  for (ManagedParameter& parameter : state.parameters()) {
    if (watched_.contains(parameter.number)) {
      parameter.before_accumulation = nullptr;
    }
  }
  watched_.clear();
  counts_.clear();
}

void LastGradients::count(std::uint32_t chunk_set) {
  Count& count = counts_[chunk_set];
  if (++count.now == count.last_one) {
    last_(chunk_set);
  }
}

}  // namespace terrace
