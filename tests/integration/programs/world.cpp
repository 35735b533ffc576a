#include "tests/integration/programs/world.h"

#include <algorithm>
#include <cstring>

namespace terrace::testing {
namespace {

std::vector<std::byte> bytes_of(const void* data, std::size_t size) {
  const auto* begin = static_cast<const std::byte*>(data);
  return {begin, begin + size};
}

}  // namespace

World::World(const std::optional<Config>& config) {
  at::set_num_threads(1);
  if (config) {
    session_.emplace(*config);
  }
  torch::manual_seed(7);
}

void World::manage(torch::nn::Module& module) {
  if (session_) {
    session_->manage(module);
    return;
  }
  for (const at::Tensor& parameter : module.parameters()) {
    const auto is_it = [&](const at::Tensor& other) { return other.is_same(parameter); };
    if (std::none_of(parameters_.begin(), parameters_.end(), is_it)) {
      parameters_.push_back(parameter);
    }
  }
}

std::unique_ptr<AdamW> World::adamw(AdamW::Options options) {
  return session_ ? std::make_unique<AdamW>(*session_, options) : std::make_unique<AdamW>(parameters_, options);
}

std::unique_ptr<AdamW> World::adamw(const AdamW::Groups& groups, AdamW::Options options) {
  return session_ ? std::make_unique<AdamW>(*session_, groups, options) : std::make_unique<AdamW>(groups, options);
}

void World::end_session() {
  usage_at_end_ = usage();
  session_.reset();
}

at::Device World::device() const { return session_ ? session_->device() : at::Device(at::kCPU); }

void World::record(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    record(name, std::string("undefined"));
    return;
  }
  const at::NoGradGuard no_grad;
  at::Tensor held = tensor.detach();
  if (session_) {
    const Gathered view = session_->gather({held}, Access::read);
    if (held.is_contiguous()) {
      recorded_.emplace_back(name, bytes_of(held.const_data_ptr(), held.nbytes()));
      return;
    }
  }
  held = held.contiguous();
  recorded_.emplace_back(name, bytes_of(held.const_data_ptr(), held.nbytes()));
}

void World::record(torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    record(item.key(), item.value());
  }
  for (const auto& item : module.named_buffers()) {
    record(item.key(), item.value());
  }
}

void World::record(const std::string& name, const std::string& text) {
  recorded_.emplace_back(name, bytes_of(text.data(), text.size()));
}

std::string numbered(const std::string& name, int number) { return name + std::to_string(number); }

Stack::Stack(std::int64_t the_width, int depth) : width(the_width) {
  for (int i = 0; i < depth; ++i) {
    layers.push_back(register_module(numbered("layer", i), torch::nn::Linear(width, width)));
  }
}

at::Tensor Stack::forward(at::Tensor x) {
  for (auto& layer : layers) {
    x = torch::tanh(layer(x));
  }
  return x;
}

}  // namespace terrace::testing
