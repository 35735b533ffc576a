/// MKL's vector functions, before several threads call one for the first time.
#pragma once

namespace terrace {

/// Has each of those that LibTorch gives to MKL computed once; from the second call on, nothing.
///
/// MKL before 2025.0 picks a function's kernel at its first call. Where threads share that call, one of them may get a
/// kernel of low accuracy for its part of the tensor: relative errors of 5e-5 in the first `tanh` of one process in 150
/// on a busy machine (https://github.com/pytorch/pytorch/issues/188792). No step of such a run has the bits of
/// another's. Threads: any.
void settle_vector_functions();

}  // namespace terrace
