/// Layer-major gradient accumulation: all micro-batches go through one part of a model before any goes through the
/// next.
///
///     std::vector<at::Tensor> x = terrace::layer_major(embed, tokens);  // of each micro-batch
///     for (const auto& layer : layers)
///       x = terrace::layer_major([layer](at::Tensor x) { return layer->forward(x); }, std::move(x));
///     std::vector<at::Tensor> losses = terrace::layer_major(loss, std::move(x), targets);
///     torch::autograd::backward(losses);  // through all micro-batches, layer by layer
///
/// A model that does not fit on the device is brought there once for all forwards and once for all backwards, not once
/// for each micro-batch, and its gradients leave once. In exchange the activations of all micro-batches are there at
/// once, so `placement.activations` is best not "keep". (GreedySnake, 2025, which calls it vertical scheduling.)
///
/// Gradients have the bits of the ordinary loop, `for (auto& batch : batches) loss(batch).backward()`: the last
/// micro-batch goes forward first, so that backward, which goes the contrary way, adds them up in the loop's order.
/// They differ in rounding where one parameter is used by several parts: those of a part are added up first. What is
/// drawn at random, and running statistics, come in another order.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "integration/block.h"

namespace terrace {

/// What a `block` of `function` returns for each micro-batch, given its inputs; each input is let go of once it was
/// used. Throws LogicError where the inputs are not all of as many micro-batches.
template <class Function, class... Inputs>
auto layer_major(Function&& function, std::vector<Inputs>... micro_batches) {
  static_assert(sizeof...(Inputs) > 0, "micro-batches are told by their inputs");
  using Result = std::decay_t<decltype(block(function, std::move(micro_batches.front())...))>;
  const std::array<std::size_t, sizeof...(Inputs)> counts{micro_batches.size()...};
  for (const std::size_t count : counts) {
    if (count != counts.front()) {
      throw LogicError("layer_major: inputs of " + std::to_string(counts.front()) + " and of " + std::to_string(count) +
                           " micro-batches are given",
                       "give each input for every micro-batch");
    }
  }
  std::vector<Result> results;
  results.reserve(counts.front());
  for (std::size_t batch = counts.front(); batch-- > 0;) {
    results.push_back(block(function, std::exchange(micro_batches[batch], Inputs())...));
  }
  std::reverse(results.begin(), results.end());
  return results;
}

}  // namespace terrace
