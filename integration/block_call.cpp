#include "integration/block_call.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include "integration/current.h"
#include "integration/pause.h"

namespace terrace {
namespace {

thread_local bool within_call = false;

Current<BlockPlanner>& current_planner() {
  static auto& planner = *new Current<BlockPlanner>;  // never destroyed: a session may live longer
  return planner;
}

}  // namespace

/// Tells the meter of what the usual source keeps.
class BlockCall::Metered final : public SavedTensorSource {
 public:
  explicit Metered(std::shared_ptr<BlockMeter> meter) : meter_(std::move(meter)) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override {
    auto kept = usual_hooks();
    return kept != nullptr ? std::make_unique<Hooks>(std::move(kept), meter_) : nullptr;
  }

 private:
  class Hooks final : public torch::autograd::SavedVariableHooks {
   public:
    Hooks(std::unique_ptr<torch::autograd::SavedVariableHooks> kept, std::shared_ptr<BlockMeter> meter)
        : kept_(std::move(kept)), meter_(std::move(meter)) {}

    void call_pack_hook(const at::Tensor& tensor) override {
      meter_->saves(tensor);
      kept_->call_pack_hook(tensor);
    }
    at::Tensor call_unpack_hook() override {
      meter_->asked_for();
      return kept_->call_unpack_hook();
    }

   private:
    const std::unique_ptr<torch::autograd::SavedVariableHooks> kept_;
    const std::shared_ptr<BlockMeter> meter_;
  };

  const std::shared_ptr<BlockMeter> meter_;
};

void set_block_planner(std::shared_ptr<BlockPlanner> planner) noexcept { current_planner().set(std::move(planner)); }

BlockCall::BlockCall(std::uint64_t given_bytes) {
  const std::shared_ptr<BlockPlanner> planner = current_planner().get();
  if (planner == nullptr || within_call || !at::GradMode::is_enabled() || c10::InferenceMode::is_enabled() ||
      SavedTensorScope::current() != nullptr || Pause::active()) {
    return;
  }
  decision_ = planner->begin_call(given_bytes);
  if (is_metered()) {
    source_ = std::make_unique<Metered>(decision_.meter);
    scope_.emplace(*source_);
  }
  is_outermost_ = within_call = true;
}

BlockCall::~BlockCall() {
  scope_.reset();
  if (is_outermost_) {
    within_call = false;
  }
  if (is_metered()) {
    decision_.meter->ends();
  }
}

}  // namespace terrace
