#include "integration/tensor_record.h"

#include <sstream>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/variable.h>

namespace terrace {

TensorRecord::TensorRecord(const at::Tensor& tensor) : options_(tensor.options()) {
  if (!tensor.is_nested()) {
    sizes_.assign(tensor.sizes().begin(), tensor.sizes().end());
  }
  if (tensor.is_inference()) {
    return;  // has no version
  }
  version_counter_ = torch::autograd::impl::version_counter(tensor);
  version_ = version_counter_.current_version();
  // Not grad_fn(), which rebuilds a view's and so would change the order of nodes.
  if (const auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    maker_ = meta->grad_fn_;
    output_number_ = meta->output_nr_;
  }
}

void TensorRecord::check_unchanged() const {
  if (!version_counter_.enabled() || version_counter_.current_version() == version_) {
    return;
  }
  // LibTorch's torch/csrc/autograd/saved_variable.cpp says it so; programs and people know these words.
  std::ostringstream text;
  text << "one of the variables needed for gradient computation has been modified by an inplace operation: ["
       << description() << "]";
  if (const auto maker = maker_.lock()) {
    text << ", which is output " << output_number_ << " of " << maker->name() << ",";
  }
  text << " is at version " << version_counter_.current_version() << "; expected version " << version_ << " instead.";
  if (torch::autograd::AnomalyMode::is_enabled()) {
    text << " Hint: the backtrace further above shows the operation that failed to compute its gradient. The "
            "variable in question was changed in there or anywhere later. Good luck!";
  } else {
    text << " Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True, check_nan=False).";
  }
  TORCH_CHECK(false, text.str());
}

void TensorRecord::share_version_with(const at::Tensor& tensor) const {
  if (version_counter_.enabled()) {
    tensor.unsafeGetTensorImpl()->set_version_counter(version_counter_);
  }
}

bool TensorRecord::matches(const at::Tensor& tensor) const {
  return tensor.scalar_type() == options_.dtype().toScalarType() && tensor.device() == options_.device() &&
         tensor.layout() == options_.layout() &&
         (tensor.is_nested() || tensor.sizes() == at::IntArrayRef(sizes_.data(), sizes_.size()));
}

std::string TensorRecord::description() const {
  std::ostringstream text;
  text << c10::toString(options_.computeDispatchKey()) << c10::toString(options_.dtype().toScalarType()) << "Type "
       << at::IntArrayRef(sizes_.data(), sizes_.size());
  return text.str();
}

std::string describe(const at::Tensor& tensor) { return TensorRecord(tensor).description(); }

}  // namespace terrace
