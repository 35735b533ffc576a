/// A model of blocks whose computation is only waited for, and that save as much as is wanted.
///
/// Forward and backward of a block last as long as they are told to, with the making of what is saved in that time;
/// backward looks at what was saved. There is one small parameter, so that there are gradients and steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "memory/activation_plan.h"

namespace terrace {

class TimedBlocks : public torch::nn::Module {
 public:
  /// Of the profile, `input_bytes` are not used: what goes from block to block is a number.
  explicit TimedBlocks(std::vector<BlockProfile> blocks);

  at::Tensor forward();

 private:
  const std::vector<BlockProfile> blocks_;
  at::Tensor weight_;
};

}  // namespace terrace
