#include "integration/backward_watch.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "integration/session_state.h"

namespace terrace {
namespace {

/// `step` takes in storages that the program has replaced.
bool is_replaced(const BackwardWatch::Member& member) {
  return ManagedStorage::of(member.parameter->tensor) != member.parameter->storage.get();
}

bool is_to_be_read_again(const BackwardWatch::Member& member) {
  return member.parameter->storage->is_to_be_read_again();
}

}  // namespace

bool BackwardWatch::is_complete(Set& set) const {
  const auto is_there = [&](const Member& member) {
    // What the program has put there is not all: backward adds to it.
    const at::Tensor& tensor = member.parameter->tensor;
    return (tensor.grad().defined() && watched_.at(member.parameter).has_arrived) || !tensor.requires_grad();
  };
  Members& members = set.members;
  if (!is_there(members[set.missing])) {
    return false;
  }
  const auto first = std::find_if_not(members.begin(), members.end(), is_there);
  set.missing = first == members.end() ? 0 : static_cast<std::size_t>(first - members.begin());
  return first == members.end();
}

void BackwardWatch::begin(SessionState& state, const Optimizer::Groups& groups) {
  end(state);
  for (std::size_t group = 0; group < groups.size(); ++group) {
    const std::vector<at::Tensor>& tensors = groups[group].params();
    for (std::size_t position = 0; position < tensors.size(); ++position) {
      ManagedParameter* const parameter = state.find(tensors[position]);
      if (parameter == nullptr || parameter->elements == 0 || !state.chunk_sets()[parameter->chunk_set].momentum) {
        continue;
      }
      if (parameter->after_accumulation) {
        end(state);
        throw LogicError(std::string(optimizer_) + ": '" + parameter->name +
                             "' is updated within backward by another optimizer already",
                         "let optimizers have disjoint parameters, or end the other one first");
      }
      sets_[parameter->chunk_set].members.push_back({parameter, group, position});
      watched_.try_emplace(parameter);
      parameter->after_accumulation = [this, parameter] { on_gradient_(*parameter); };
    }
  }
}

void BackwardWatch::end(SessionState& state) {
  for (ManagedParameter& parameter : state.parameters()) {
    if (watched_.contains(&parameter)) {
      parameter.after_accumulation = nullptr;
    }
  }
  watched_.clear();
  complete_.clear();
  sets_.clear();
}

std::vector<const BackwardWatch::Members*> BackwardWatch::completed_by(const ManagedParameter& parameter) {
  if (!parameter.tensor.grad().defined()) {
    return {};  // the program's own hook has dropped it
  }
  if (watched_.at(&parameter).is_used_up) {
    throw LogicError(std::string(optimizer_) + ": '" + parameter.name +
                         "' has a second gradient since the last step, and the first is used up",
                     "call step after each backward, also after one that failed; or do without update_in_backward to "
                     "accumulate gradients");
  }
  watched_.at(&parameter).has_arrived = true;
  const auto set = sets_.find(parameter.chunk_set);  // none where it has moved to another chunk: `step` updates it
  if (set != sets_.end() && is_complete(set->second) &&
      std::find(complete_.begin(), complete_.end(), set->first) == complete_.end()) {
    complete_.push_back(set->first);
  }
  const auto ready = std::partition(complete_.begin(), complete_.end(), [&](std::uint32_t index) {
    const Members& members = sets_.at(index).members;
    return std::any_of(members.begin(), members.end(), is_to_be_read_again);
  });
  std::vector<const Members*> completed;
  for (auto index = ready; index != complete_.end(); ++index) {
    const Members& members = sets_.at(*index).members;
    if (std::none_of(members.begin(), members.end(), is_replaced)) {
      completed.push_back(&members);
    }
  }
  complete_.erase(ready, complete_.end());
  return completed;
}

void BackwardWatch::use_up(const ManagedParameter& parameter) {
  if (const auto watched = watched_.find(&parameter); watched != watched_.end()) {
    watched->second.is_used_up = true;
  }
}

}  // namespace terrace
