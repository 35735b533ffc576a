/// Where a program of the table runs: plain LibTorch, or a session of some configuration. The program says the same in
/// both, and records what must come out the same, bit for bit.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <terrace/terrace.h>
#include <torch/torch.h>

namespace terrace::testing {

/// What a program has to show for itself, in the order in which it came.
using Recorded = std::vector<std::pair<std::string, std::vector<std::byte>>>;

class World {
 public:
  /// Without a configuration there is no session. Seeds LibTorch's generator.
  explicit World(const std::optional<Config>& config);

  /// Builds a module as a user would.
  template <class Module, class... Arguments>
  std::shared_ptr<Module> make(const Arguments&... arguments) {
    const auto build = [&] { return std::make_shared<Module>(arguments...); };
    return session_ ? session_->construct(build) : build();
  }
  void manage(torch::nn::Module& module);
  /// Over all that is managed so far, and with a session what is managed later.
  std::unique_ptr<AdamW> adamw(AdamW::Options options = AdamW::Options(1e-2));
  std::unique_ptr<AdamW> adamw(const AdamW::Groups& groups, AdamW::Options options = AdamW::Options(1e-2));
  at::Device device() const;
  /// Null where there is none, or none any more.
  Session* session() noexcept { return session_ ? &*session_ : nullptr; }
  void end_session();
  /// Of the session as it is, or as it ended.
  MemoryUsage usage() const { return session_ ? session_->memory_usage() : usage_at_end_; }

  void record(const std::string& name, const at::Tensor& tensor);
  /// All parameters and buffers.
  void record(torch::nn::Module& module);
  void record(const std::string& name, const std::string& text);
  const Recorded& recorded() const noexcept { return recorded_; }

 private:
  std::optional<Session> session_;
  MemoryUsage usage_at_end_;
  std::vector<at::Tensor> parameters_;
  Recorded recorded_;
};

/// Steps of forward, backward, update and zeroing; records each loss and at the end the module. `loss_of` gives the
/// loss of a step.
template <class LossOf>
void train(World& world, torch::nn::Module& module, torch::optim::Optimizer& optimizer, LossOf&& loss_of,
           int steps = 4) {
  for (int step = 0; step < steps; ++step) {
    const at::Tensor loss = loss_of(step);
    loss.backward();
    world.record("loss", loss);
    optimizer.step();
    optimizer.zero_grad();
  }
  world.record(module);
}

/// Manages the module, makes an optimizer for it, and trains.
template <class LossOf>
void train(World& world, torch::nn::Module& module, LossOf&& loss_of, int steps = 4) {
  world.manage(module);
  const std::unique_ptr<AdamW> optimizer = world.adamw();
  train(world, module, *optimizer, std::forward<LossOf>(loss_of), steps);
}

/// Such as "layer3".
std::string numbered(const std::string& name, int number);

/// Linear layers of one width with tanh between: the plainest model, for what is unusual about the rest of a program.
struct Stack : torch::nn::Module {
  explicit Stack(std::int64_t width = 64, int depth = 6);
  at::Tensor forward(at::Tensor x);
  /// A loss over random input.
  at::Tensor loss() { return forward(torch::randn({8, width})).pow(2).mean(); }

  const std::int64_t width;
  std::vector<torch::nn::Linear> layers;
};

}  // namespace terrace::testing
