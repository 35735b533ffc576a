// Terrace's AdamW for programs that load a library at run time, as tools/compare_adam does.

#include <cstddef>
#include <cstdint>

#include "optimizer/adamw.h"
#include "optimizer/update_threads.h"
#include "tools/update_traffic.h"

namespace {

terrace::UpdateRun run_of(int parameter_type, int states, void* parameter, const void* gradient, void* master,
                          void* momentum, void* variance, std::size_t count) {
  const auto type = static_cast<terrace::ElementType>(parameter_type);
  return {.parameter_type = type,
          .gradient_type = type,
          .states = static_cast<terrace::StateFormat>(states),
          .parameter = parameter,
          .gradient = gradient,
          .master = master,
          .momentum = momentum,
          .variance = variance,
          .count = count};
}

}  // namespace

extern "C" {

terrace::UpdateThreads* terrace_threads_new(int count) { return new terrace::UpdateThreads(count); }
void terrace_threads_delete(const terrace::UpdateThreads* threads) { delete threads; }

/// One step over `count` elements on the CPU. `parameter_type`: 0 fp32, 1 bf16, also of the gradient; `states`: 0
/// float32, 1 split, 2 split_bfloat16, as optimizer/state_format.h has them.
void terrace_adamw(const terrace::UpdateThreads* threads, double learning_rate, double beta1, double beta2,
                   double epsilon, double weight_decay, std::int64_t step, int parameter_type, int states,
                   void* parameter, const void* gradient, void* master, void* momentum, void* variance,
                   std::size_t count) {
  terrace::adamw_update(terrace::AdamWStep({.learning_rate = learning_rate,
                                            .beta1 = beta1,
                                            .beta2 = beta2,
                                            .epsilon = epsilon,
                                            .weight_decay = weight_decay},
                                           step),
                        run_of(parameter_type, states, parameter, gradient, master, momentum, variance, count),
                        *threads);
}

/// Reads and writes the same bytes, and changes none.
void terrace_traffic(const terrace::UpdateThreads* threads, int parameter_type, int states, void* parameter,
                     const void* gradient, void* master, void* momentum, void* variance, std::size_t count) {
  terrace::pass_over(run_of(parameter_type, states, parameter, gradient, master, momentum, variance, count), *threads);
}

}  // extern "C"
