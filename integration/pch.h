#pragma once

/// Precompiled once for every target that includes LibTorch: parsing it takes half a minute.

#include <torch/torch.h>
