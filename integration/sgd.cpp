#include "integration/sgd.h"

#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "integration/optimizer_backend.h"
#include "integration/optimizer_states.h"
#include "optimizer/sgd.h"

namespace terrace {
namespace {

std::shared_ptr<const UpdateRule> rule(const torch::optim::OptimizerOptions& group, bool maximize) {
  const auto& options = options_of<SGD::Options>(group, sgd_name);
  require_not_negative(options.lr(), sgd_name, "the learning rate");
  require_not_negative(options.momentum(), sgd_name, "the momentum");
  require_not_negative(options.weight_decay(), sgd_name, "the weight decay");
  require_option(std::isfinite(static_cast<float>(options.dampening())), sgd_name,
                 "the dampening is " + std::to_string(options.dampening()) + ", not a finite number");
  require_option(!options.nesterov() || (options.momentum() > 0 && options.dampening() == 0), sgd_name,
                 "Nesterov's momentum needs a momentum above 0 and no dampening");
  return std::make_shared<SgdRule>(SgdOptions{.learning_rate = options.lr(),
                                              .momentum = options.momentum(),
                                              .dampening = options.dampening(),
                                              .weight_decay = options.weight_decay(),
                                              .nesterov = options.nesterov(),
                                              .maximize = maximize});
}

constexpr OptimizerKind kind{.name = sgd_name, .rule = rule};

auto cloned(SGD::Options options) { return std::make_unique<SGD::Options>(std::move(options)); }

}  // namespace

SGD::SGD(Session& session, Options defaults) : Optimizer(kind, session, cloned(std::move(defaults))) {}

SGD::SGD(Session& session, const Groups& groups, Options defaults)
    : Optimizer(kind, session, groups, cloned(std::move(defaults))) {}

SGD::SGD(std::vector<at::Tensor> parameters, Options defaults, const Config::Optimizer& config)
    : Optimizer(kind, std::move(parameters), cloned(std::move(defaults)), config) {}

SGD::SGD(const Groups& groups, Options defaults, const Config::Optimizer& config)
    : Optimizer(kind, groups, cloned(std::move(defaults)), config) {}

}  // namespace terrace
