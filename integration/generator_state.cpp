#include "integration/generator_state.h"

#include <atomic>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

namespace terrace {
namespace {

std::atomic<c10::Device> program_device{c10::Device(c10::DeviceType::CPU)};

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
  const c10::Device device = program_device.load(std::memory_order_relaxed);
  if (!device.is_cpu()) {
    at::Generator on_device = at::globalContext().defaultGenerator(device);
    const std::scoped_lock device_lock(on_device.mutex());
    state.on_device_ = {.device = device, .seed = on_device.current_seed(), .offset = on_device.get_offset()};
  }
  return state;
}

void GeneratorState::restore() const {
  at::CPUGeneratorImpl& generator = default_generator();
  const std::scoped_lock lock(generator.mutex_);
  generator.set_engine(engine_);
  generator.set_next_float_normal_sample(next_float_);
  generator.set_next_double_normal_sample(next_double_);
  if (on_device_) {
    at::Generator on_device = at::globalContext().defaultGenerator(on_device_->device);
    const std::scoped_lock device_lock(on_device.mutex());
    on_device.set_current_seed(on_device_->seed);
    on_device.set_offset(on_device_->offset);
  }
}

bool GeneratorState::operator==(const GeneratorState& other) const {
  const at::mt19937_data_pod ours = engine_.data();
  const at::mt19937_data_pod theirs = other.engine_.data();
  return ours.seed_ == theirs.seed_ && ours.left_ == theirs.left_ && ours.seeded_ == theirs.seeded_ &&
         ours.next_ == theirs.next_ && ours.state_ == theirs.state_ && next_float_ == other.next_float_ &&
         next_double_ == other.next_double_ && on_device_ == other.on_device_;
}

void GeneratorState::set_device(c10::Device device) noexcept {
  program_device.store(device, std::memory_order_relaxed);
}

}  // namespace terrace
