/// LibTorch's CUDA part in software, with a CUDA driver in software below it: tensors are on `cuda:0` in all that
/// LibTorch and a session see, and computed on the CPU by LibTorch's own kernels, with the bits that these give.
///
/// Bytes that a session has closed are out of reach of ops here as on a GPU. Ops are done when they return; what is
/// asynchronous is the device's copies. The pool of the program's tensors keeps what is freed, as LibTorch's does, in
/// segments of 64 KiB and more.
///
/// It takes the place of the real ones for the whole program that links it.
#pragma once

#include <cstdint>
#include <memory>

#include "tests/offload/software_cuda.h"

namespace terrace::testing {

/// The driver that sessions get, with memory for 1 GiB of which the pool's is part.
std::shared_ptr<SoftwareCuda> software_cuda();

/// What the pool has reserved, in use and kept.
std::uint64_t pool_bytes();

}  // namespace terrace::testing
