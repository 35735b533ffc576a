/// Tensors whose bytes are on the device and stay there, to be reached as those of any tensor: what
/// `Session::gather` returns.
///
/// Ends with its last holder, or with the session. Movable; any thread may end it.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace terrace {

class OpenStorages;

class Gathered {
 public:
  /// In the order in which they were asked for; a module's parameters in the order of `parameters()`.
  const std::vector<at::Tensor>& tensors() const noexcept { return tensors_; }

 private:
  friend class SessionState;

  Gathered(std::vector<at::Tensor> tensors, std::shared_ptr<OpenStorages> open)
      : tensors_(std::move(tensors)), open_(std::move(open)) {}

  std::vector<at::Tensor> tensors_;
  std::shared_ptr<OpenStorages> open_;
};

}  // namespace terrace
