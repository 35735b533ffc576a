/// What becomes of the tensors that autograd saves for backward.
///
/// LibTorch's C++ interface has no saved-tensor hooks of its own, but asks its autograd engine for them. So an
/// engine is installed that answers from the calling thread's source, or the usual one, and leaves all else, backward
/// included, to the engine that was there before (LibTorch's own, or Python's), which it asks where the thread has no
/// source.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace terrace {

class SavedTensorSource {
 public:
  virtual ~SavedTensorSource() = default;
  /// Hooks for one tensor about to be saved. They may be dropped unused: LibTorch packs no wrapped numbers.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
};

/// While one lives, `source` gives the hooks for what the thread that made it saves. They nest.
class SavedTensorScope {
 public:
  explicit SavedTensorScope(SavedTensorSource& source) noexcept : outer_(current_) { current_ = &source; }
  ~SavedTensorScope() { current_ = outer_; }
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

  /// This thread's source, or null.
  static SavedTensorSource* current() noexcept { return current_; }

 private:
  static inline thread_local SavedTensorSource* current_ = nullptr;
  SavedTensorSource* const outer_;
};

/// Gives the hooks for what threads save that have no source of their own, and whose engine has none; null: nobody
/// does. Whoever asks the one before while it changes keeps it alive for so long.
void set_usual_source(std::shared_ptr<SavedTensorSource> source) noexcept;

/// Hooks from the usual source; null where there is none.
std::unique_ptr<torch::autograd::SavedVariableHooks> usual_hooks();

/// A tensor without its graph, kept in the way in which the usual source keeps what is saved; where there is none, as
/// it is.
class KeptTensor {
 public:
  explicit KeptTensor(const at::Tensor& tensor);

  /// It may be the same each time. Throws what the source throws when it cannot give it back.
  at::Tensor get() const;

 private:
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks_;
  at::Tensor tensor_;  ///< where there are none
};

/// Installs the engine where it is not yet, or no longer: whoever loads Python's later replaces it. Must not run
/// beside backward passes. It is never removed.
void install_saved_tensor_hooks();

}  // namespace terrace
