#include "integration/adamw.h"

#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "integration/optimizer_backend.h"
#include "integration/optimizer_states.h"
#include "optimizer/adamw.h"

namespace terrace {
namespace {

std::shared_ptr<const UpdateRule> rule(const torch::optim::OptimizerOptions& group, bool maximize) {
  const auto& options = options_of<AdamW::Options>(group, adamw_name);
  const auto require = [](bool holds, const std::string& what) { require_option(holds, adamw_name, what); };
  const auto [beta1, beta2] = options.betas();
  require(!options.amsgrad(), "amsgrad is not supported");
  require_not_negative(options.lr(), adamw_name, "the learning rate");
  require_not_negative(options.eps(), adamw_name, "eps");
  require(beta1 >= 0 && beta1 < 1, "the first beta is " + std::to_string(beta1) + ", not in [0, 1)");
  require(beta2 >= 0 && beta2 < 1, "the second beta is " + std::to_string(beta2) + ", not in [0, 1)");
  require_not_negative(options.weight_decay(), adamw_name, "the weight decay");
  require(std::isfinite(static_cast<float>(options.lr() / (1 - beta1))),
          "the learning rate over 1 less the first beta, as the first step has it, is more than fp32 can hold");
  return std::make_shared<AdamWRule>(AdamWOptions{.learning_rate = options.lr(),
                                                  .beta1 = beta1,
                                                  .beta2 = beta2,
                                                  .epsilon = options.eps(),
                                                  .weight_decay = options.weight_decay(),
                                                  .maximize = maximize});
}

constexpr OptimizerKind kind{.name = adamw_name, .rule = rule};

auto cloned(AdamW::Options options) { return std::make_unique<AdamW::Options>(std::move(options)); }

}  // namespace

AdamW::AdamW(Session& session, Options defaults) : Optimizer(kind, session, cloned(std::move(defaults))) {}

AdamW::AdamW(Session& session, const Groups& groups, Options defaults)
    : Optimizer(kind, session, groups, cloned(std::move(defaults))) {}

AdamW::AdamW(std::vector<at::Tensor> parameters, Options defaults, const Config::Optimizer& config)
    : Optimizer(kind, std::move(parameters), cloned(std::move(defaults)), config) {}

AdamW::AdamW(const Groups& groups, Options defaults, const Config::Optimizer& config)
    : Optimizer(kind, groups, cloned(std::move(defaults)), config) {}

}  // namespace terrace
