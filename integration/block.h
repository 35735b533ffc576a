/// A unit of a model that the plan may keep, offload or recompute.
///
///     x = terrace::block([layer](at::Tensor x) { return layer->forward(x); }, x);
///
/// Inputs and result may be of any type. Where `placement.activations` is "recompute", a session lives and a graph
/// is recorded, the tensors that autograd saves within the block are not kept: backward runs the function again to
/// get them. Everywhere else the function is called straight through. Results are the same either way; managed buffers
/// that the function writes in place, as batch norm does, change once. It must write them by ops on its own thread and
/// without a graph (under NoGradGuard, or what needs no gradient), or they end with that of the later run; and give
/// none of them another storage, size or shape (set_data, resize_, t_): that would happen twice. Nobody may give them
/// another storage before backward, or run backward through blocks that write the same ones on two threads at once.
///
/// The function must depend on nothing that changes between forward and backward but its inputs and the parameters
/// it uses, and draw random numbers from LibTorch's default generator only. It and its inputs are copied and live
/// as long as the graph, and so must all that they point to. If an input or a managed parameter is changed in place
/// before backward (as `step()` does), backward throws what LibTorch throws for a saved tensor that was changed. If
/// the function saves other tensors when it runs again, or draws other random numbers, as where another thread draws
/// from that generator while it runs, backward throws LogicError.
///
/// Where the function itself asks for gradients of what it makes, the way there must lie within the block: the inputs
/// of a later run have no graph.
///
/// A block called within another one is part of that one. Tensors in inputs that are structs are not looked for:
/// only those that autograd saves are checked for changes.
#pragma once

#include <cstddef>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "integration/block_call.h"
#include "integration/block_inputs.h"
#include "integration/recomputed_block.h"

namespace terrace {
namespace block_detail {

/// A call of `Function` on `Inputs`, as types that were forwarded.
template <class Function, class... Inputs>
class Call final : public RecomputedBlock {
 public:
  template <class GivenFunction>
  explicit Call(GivenFunction&& function, const std::decay_t<Inputs>&... inputs)
      : function_(std::forward<GivenFunction>(function)), inputs_(inputs...) {
    // Without their graphs: one that was changed in place within the block would keep itself alive by its own.
    for_each_tensor(inputs_, [this](at::Tensor& tensor) {
      depends_on(tensor);
      tensors_.push_back(Input{KeptTensor(tensor), tensor.requires_grad()});
      tensor = placeholder();
    });
  }

  decltype(auto) function() const { return as_given<Function>(function_); }

 private:
  void run_again() const override {
    auto inputs = inputs_;
    for_each_tensor(inputs, [this, position = std::size_t{0}](at::Tensor& tensor) mutable {
      const Input& input = tensors_[position++];
      tensor = input.tensor.get().detach().requires_grad_(input.requires_grad);  // new: hooks would stay on it
    });
    std::apply([this](auto&... kept) { static_cast<void>(function()(as_given<Inputs>(kept)...)); }, inputs);
  }

  struct Input {
    KeptTensor tensor;
    bool requires_grad;
  };

  mutable std::decay_t<Function> function_;
  std::tuple<std::decay_t<Inputs>...> inputs_;
  std::vector<Input> tensors_;  // those in them
};

}  // namespace block_detail

/// Returns what `function(inputs...)` returns.
template <class Function, class... Inputs>
auto block(Function&& function, Inputs&&... inputs) {
  static_assert((std::is_copy_constructible_v<std::decay_t<Inputs>> && ...),
                "a block's inputs are copied, so that it can run again");
  static_assert((block_detail::owns_its_elements<std::decay_t<Inputs>> && ...),
                "a block's inputs outlive the call: pass a vector or a string, not a view of one");
  std::uint64_t given_bytes = 0;
  (block_detail::for_each_tensor(
       inputs, [&](const at::Tensor& tensor) { given_bytes += tensor.has_storage() ? tensor.nbytes() : 0; }),
   ...);
  BlockCall call(given_bytes);
  if (!call.runs_again()) {
    if (call.is_metered()) {
      (block_detail::for_each_tensor(inputs, [&](const at::Tensor& tensor) { call.reads(tensor); }), ...);
    }
    return std::forward<Function>(function)(std::forward<Inputs>(inputs)...);
  }
  const auto recomputed =
      std::make_shared<block_detail::Call<Function, Inputs...>>(std::forward<Function>(function), inputs...);
  const RecomputedBlock::Recording recording(*recomputed);
  return recomputed->function()(std::forward<Inputs>(inputs)...);
}

}  // namespace terrace
