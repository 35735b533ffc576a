/// What is remembered of a tensor that is not kept itself: its type, its shape, and its version, which tells
/// whether it was changed in place since.
///
/// LibTorch checks the versions of what it saves, but not of what goes through saved-tensor hooks. Holds the
/// tensor's version counter and nothing of its bytes or graph.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

namespace terrace {

class TensorRecord {
 public:
  /// `tensor` is defined.
  explicit TensorRecord(const at::Tensor& tensor);

  /// Throws c10::Error, with the words that LibTorch has for it, if the tensor was changed in place since.
  void check_unchanged() const;
  /// A change of `tensor` counts as one of the tensor that this is of.
  void share_version_with(const at::Tensor& tensor) const;
  /// Whether `tensor` has the same type, device and shape.
  bool matches(const at::Tensor& tensor) const;
  /// Such as "CPUFloatType [8, 64]".
  std::string description() const;

 private:
  c10::TensorOptions options_;
  c10::SmallVector<std::int64_t, 4> sizes_;  // empty for a nested tensor
  c10::VariableVersion version_counter_;
  std::uint32_t version_ = 0;
  std::uint32_t output_number_ = 0;
  std::weak_ptr<torch::autograd::Node> maker_;  // weak: the maker may own this record
};

/// As `TensorRecord::description`, of a tensor at hand.
std::string describe(const at::Tensor& tensor);

}  // namespace terrace
