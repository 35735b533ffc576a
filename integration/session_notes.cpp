// What a session learns of its models while they train, for the next run.

#include <algorithm>
#include <numeric>

#include "base/log.h"
#include "integration/session_state.h"

namespace terrace {
namespace {

/// Another order moves less by at least one part in so many, or it is left as it is.
constexpr std::size_t worthwhile = 20;

}  // namespace

void SessionState::learn_of_models(bool gradients_rest) noexcept {
  if (!is_learning_) {
    return;
  }
  const auto held = lock();
  for (Model& model : models_) {
    if (!model.is_learned) {
      model.is_learned = learn_of(model, gradients_rest);
    }
  }
  is_learning_ = std::any_of(models_.begin(), models_.end(), [](const Model& model) { return !model.is_learned; });
}

bool SessionState::learn_of(Model& model, bool gradients_rest) noexcept {
  try {
    std::uint64_t accumulations = 0;
    bool is_trainable = false;
    for (const ManagedParameter* parameter : model.parameters) {
      is_trainable = is_trainable || parameter->tensor.requires_grad();
      accumulations = std::max(accumulations, parameter->accumulations);
    }
    if (accumulations == 0) {
      return !is_trainable;  // of what is never trained nothing is to be learned
    }
    ModelNotes learned = model.notes;
    if (places_gradients_by_notes()) {
      learned.gradients_read_once = gradients_rest && accumulations == 1;
      if (!learned.gradients_read_once) {
        learned.forward_seconds = learned.backward_seconds = 0;
      }
    }
    if (lays_out_by_notes()) {
      learned.order = better_order_of(model);
      learned.most_operands =
          learned.order.empty() ? 0 : std::max<std::uint64_t>(learned.most_operands, most_operands_);
      learned.device_bytes = learned.order.empty() ? 0 : learned.device_bytes;
      note_device_bytes(model, learned);
    }
    keep(model, std::move(learned));
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("nothing was learned of a model: ") + error.what());
  }
  return true;
}

std::vector<std::uint32_t> SessionState::better_order_of(const Model& model) const {
  const auto first_use = [&](std::uint32_t position) {
    // What was not used comes last.
    return model.parameters[position]->storage->first_use() - 1;
  };
  std::vector<std::uint32_t> order(model.parameters.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t one, std::uint32_t other) { return first_use(one) < first_use(other); });
  std::vector<LayoutRun> runs;
  std::vector<LayoutRun> by_use;
  for (std::size_t i = 0; i < order.size(); ++i) {
    runs.push_back(run_of(*model.parameters[i]));
    by_use.push_back(run_of(*model.parameters[order[i]]));
  }
  const std::size_t changes = Layout::plan(runs, chunk_bytes_).changes_of_chunk(order);
  const std::size_t changes_by_use = Layout::plan(by_use, chunk_bytes_).in_order_of(order).changes_of_chunk(order);
  if (changes_by_use + changes / worthwhile >= changes) {
    order.clear();
  }
  return order;
}

void SessionState::note_device_bytes(const Model& model, ModelNotes& notes) const {
  if (notes.order.empty()) {
    return;
  }
  const std::uint64_t needed = memory_.budget(Tier::device).needed();
  // By use it may have been more than by construction, but not by more than this.
  const std::uint64_t beyond = model.is_laid_out_by_use ? notes.more_in_another_order(model.largest_chunk_bytes) : 0;
  notes.device_bytes = std::max(notes.device_bytes, needed - std::min(needed, beyond));
}

void SessionState::note_refusal(ModelNotes& notes) const {
  notes.device_bytes = std::max(notes.device_bytes, memory_.budget(Tier::device).capacity());
  log(LogLevel::warning,
      "chunks lay in the order of use (placement.order) where memory was refused; the next run of this model lays them "
      "out in the order of construction, unless device.memory is larger");
}

void SessionState::keep(Model& model, ModelNotes notes) {
  if (notes != model.notes) {
    model.file.save(notes);
    model.notes = std::move(notes);
  }
}

void SessionState::learn_at_end(Model& model) noexcept {
  try {
    ModelNotes notes = model.notes;
    if (model.is_learned) {
      note_device_bytes(model, notes);
      note_step_times(notes);
    }
    if (model.is_laid_out_by_use && was_refused_memory_) {
      note_refusal(notes);
    }
    keep(model, std::move(notes));
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("what a model has needed is not kept: ") + error.what());
  }
}

void SessionState::note_step_times(ModelNotes& notes) const {
  // Times differ from run to run: for less than that nothing is written, nor placed in another way.
  const auto is_far_from = [](double known, double seen) { return seen < known * 0.8 || seen > known * 1.25; };
  const double forward = step_clock_.forward_seconds();
  const double backward = step_clock_.backward_seconds();
  if (notes.gradients_read_once && places_gradients_by_notes() && backward > 0 &&
      (is_far_from(notes.forward_seconds, forward) || is_far_from(notes.backward_seconds, backward))) {
    notes.forward_seconds = forward;
    notes.backward_seconds = backward;
  }
}

}  // namespace terrace
