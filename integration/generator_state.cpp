#include "integration/generator_state.h"

#include <mutex>

#include <ATen/CPUGeneratorImpl.h>

namespace terrace {
namespace {

at::CPUGeneratorImpl& default_generator() {
  return *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
}

}  // namespace

GeneratorState GeneratorState::now() {
  at::CPUGeneratorImpl& generator = default_generator();
  const std::scoped_lock lock(generator.mutex_);
  GeneratorState state;
  state.engine_ = generator.engine();
  state.next_float_ = generator.next_float_normal_sample();
  state.next_double_ = generator.next_double_normal_sample();
  return state;
}

void GeneratorState::restore() const {
  at::CPUGeneratorImpl& generator = default_generator();
  const std::scoped_lock lock(generator.mutex_);
  generator.set_engine(engine_);
  generator.set_next_float_normal_sample(next_float_);
  generator.set_next_double_normal_sample(next_double_);
}

}  // namespace terrace
