// AdamW over ordinary tensors: the same kernels, at once. What managed training must equal bit for bit.

#include <unordered_map>

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include "base/error.h"
#include "integration/adamw_backend.h"
#include "optimizer/gradient_norm.h"

namespace terrace {
namespace {

ElementType element_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat ? ElementType::float32 : ElementType::bfloat16;
}

class Ordinary final : public AdamWBackend {
 public:
  explicit Ordinary(StateFormat format) : format_(format) {}

  void step(AdamW::Groups& groups) override {
    norm_.reset();
    float scale = 1.0f;
    if (max_gradient_norm > 0) {
      norm_ = norm_of(groups);
      scale = clip_coefficient(*norm_, max_gradient_norm);
    }
    for (auto& group : groups) {
      const AdamWOptions options = checked_options(group, maximize);
      for (at::Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) {
          update(parameter, options, scale);
        }
      }
    }
  }

  std::optional<double> gradient_norm() const override { return norm_; }

 private:
  struct State {
    std::int64_t step = 0;
    at::Tensor master;  // where the parameter is bf16: fp32, or the lower halves as integers
    at::Tensor momentum;
    at::Tensor variance;
  };

  /// The gradient with its elements in the order of the parameter's and of its type, on the CPU.
  static at::Tensor aligned_gradient(const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.grad();
    if (gradient.layout() != at::kStrided) {
      throw LogicError("AdamW: sparse gradients are not supported");
    }
    if (!parameter.is_non_overlapping_and_dense()) {
      throw LogicError("AdamW: a parameter whose elements overlap or leave gaps cannot be updated");
    }
    if (parameter.scalar_type() != at::kFloat && parameter.scalar_type() != at::kBFloat16) {
      throw LogicError(std::string("AdamW updates float32 and bfloat16 parameters, not ") +
                       c10::toString(parameter.scalar_type()));
    }
    if (gradient.sizes() != parameter.sizes()) {
      throw LogicError(
          c10::str("AdamW: a parameter of shape ", parameter.sizes(), " has a gradient of shape ", gradient.sizes()),
          "give it one of its own shape");
    }
    if (gradient.strides() == parameter.strides() && gradient.scalar_type() == parameter.scalar_type()) {
      return gradient.to(at::kCPU);
    }
    return at::empty_like(parameter, at::TensorOptions().device(at::kCPU)).copy_(gradient);
  }

  double norm_of(const AdamW::Groups& groups) const {
    std::vector<double> sums;
    for (const auto& group : groups) {
      for (const at::Tensor& parameter : group.params()) {
        if (!parameter.grad().defined()) {
          continue;
        }
        const at::Tensor gradient = aligned_gradient(parameter);
        sums.push_back(sum_of_squares(element_type(gradient), gradient.const_data_ptr(),
                                      static_cast<std::size_t>(gradient.numel()), threads_));
      }
    }
    return combined_norm(sums);
  }

  void update(const at::Tensor& trained, const AdamWOptions& options, float scale) {
    const at::Tensor gradient = aligned_gradient(trained);
    const at::Tensor parameter = trained.to(at::kCPU);  // where it is already, it is the same tensor
    State& state = states_[trained.unsafeGetTensorImpl()];
    const ElementType type = element_type(parameter);
    if (state.step == 0) {
      const at::ScalarType moments = moment_type(format_) == ElementType::float32 ? at::kFloat : at::kBFloat16;
      state.momentum = at::zeros_like(parameter, moments);
      state.variance = at::zeros_like(parameter, moments);
      if (const std::size_t bytes = master_bytes(format_, type); bytes != 0) {
        state.master = at::zeros_like(parameter, bytes == sizeof(float) ? at::kFloat : at::kShort);
      }
    }
    const AdamWStep step(options, ++state.step, scale);
    adamw_update(step,
                 {.parameter_type = type,
                  .gradient_type = type,
                  .states = format_,
                  .parameter = parameter.mutable_data_ptr(),
                  .gradient = gradient.const_data_ptr(),
                  .master = state.master.defined() ? state.master.mutable_data_ptr() : nullptr,
                  .momentum = state.momentum.mutable_data_ptr(),
                  .variance = state.variance.mutable_data_ptr(),
                  .count = static_cast<std::size_t>(parameter.numel())},
                 threads_);
    if (!trained.is_cpu()) {
      trained.copy_(parameter);  // which bumps its version
      return;
    }
    trained.unsafeGetTensorImpl()->bump_version();
  }

  const StateFormat format_;
  const UpdateThreads threads_{at::get_num_threads()};
  std::unordered_map<const c10::TensorImpl*, State> states_;
  std::optional<double> norm_;
};

}  // namespace

std::unique_ptr<AdamWBackend> make_ordinary_backend(StateFormat states) { return std::make_unique<Ordinary>(states); }

}  // namespace terrace
