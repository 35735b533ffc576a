#include "tools/training.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numbers>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/memory_info.h"
#include "integration/element_types.h"
#include "integration/program_device.h"
#include "integration/vector_functions.h"
#include "optimizer/state_format.h"
#include "tools/least_memory.h"
#include "tools/saturating.h"

namespace terrace {
namespace {

constexpr double kLastRate = 0.1;  // of the highest
constexpr double kTemperature = 0.8;

GptOptions gpt_options(const Config::Model& model) {
  return {.layers = model.layers, .heads = model.heads, .width = model.width, .sequence = model.sequence};
}

/// Of CUDA's kernels, those that give the same bits each time: losses depend on the configuration alone.
void compute_deterministically() {
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

/// In [0, 1), from 53 bits: the standard's distributions differ between libraries.
double uniform(std::mt19937_64& generator) { return static_cast<double>(generator() >> 11U) * 0x1p-53; }

}  // namespace

double learning_rate_at(const Config::Train& train, std::int64_t step) {
  if (step < train.warmup)
    return train.learning_rate * static_cast<double>(step + 1) / static_cast<double>(train.warmup);
  const auto rest = static_cast<double>(std::max<std::int64_t>(train.steps - train.warmup, 1));
  const double cosine = std::cos(std::numbers::pi * static_cast<double>(step - train.warmup) / rest);
  return train.learning_rate * (kLastRate + (1 - kLastRate) * 0.5 * (1 + cosine));
}

Training::Training(const Config& config, const Dataset& dataset, bool unmanaged)
    : config_(config), dataset_(dataset), generator_(config.train.seed) {
  gpt_options(config.model).validate();  // before anything is taken from the tiers
  device_ = program_device(config.device);
  if (device_.is_cuda()) compute_deterministically();
  if (unmanaged) {
    settle_vector_functions();  // as a session does: to have its bits
    if (device_.is_cpu()) require_available_memory(state_bytes(), available_memory_bytes());
  } else {
    session_.emplace(config);
    require_least_memory(config, bytes_of_parameter(), session_->memory_usage());
  }
  typed([&] { build(); });
  const MemoryUsage built = usage();
  counted_ = {.bytes_moved = built.bytes_moved,
              .stall_seconds_by_cause = built.stall_seconds_by_cause,
              .update_seconds = built.update_seconds};
}

void Training::build() {
  torch::manual_seed(config_.train.seed);
  const auto make = [&] {
    Gpt model(gpt_options(config_.model));
    if (config_.model.dtype == "bfloat16") model->to(torch::kBFloat16);
    return model;
  };
  const auto options = torch::optim::AdamWOptions(config_.train.learning_rate)
                           .betas({0.9, 0.95})
                           .weight_decay(config_.train.weight_decay);
  if (session_) {
    model_ = session_->construct(make);
    session_->manage(*model_);
    optimizer_.emplace(*session_, parameter_groups(*model_, options), options);
  } else {
    model_ = make();
    model_->to(device_);
    optimizer_.emplace(parameter_groups(*model_, options), options, config_.optimizer);
  }
  optimizer_->max_gradient_norm(config_.train.max_gradient_norm);
}

StepMetrics Training::step() {
  const Stopwatch watch;
  StepMetrics metrics;
  metrics.learning_rate = learning_rate_at(config_.train, steps_done_);
  typed([&] {
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(metrics.learning_rate);
    metrics.loss = last_loss_ = accumulate_gradients();
    // It has been found by now: what that update changed has been used.
    norm_before_ = {.step = steps_done_, .value = gradient_norm_of(steps_done_)};
    optimizer_->step();
    optimizer_->zero_grad();
  });
  metrics.step = ++steps_done_;
  metrics.tokens = config_.train.micro_batch * config_.train.accumulate * config_.model.sequence;

  const MemoryUsage now = usage();
  const MemoryUsage::AtStepEnd before = std::exchange(counted_, now.at_step_end);
  for (const StallCause cause : all_stall_causes) {
    double& seconds = metrics.stall_seconds_by_cause[index_of(cause)];
    seconds = counted_.stall_seconds_by_cause[index_of(cause)] - before.stall_seconds_by_cause[index_of(cause)];
    metrics.stall_seconds += seconds;
  }
  metrics.update_seconds = counted_.update_seconds - before.update_seconds;
  for (const Tier tier : all_tiers) metrics.peak_bytes[index_of(tier)] = now.step_peak(tier);
  for (const Link link : all_links) metrics.bytes_moved[index_of(link)] = counted_.moved(link) - before.moved(link);
  metrics.seconds = watch.elapsed_seconds();
  return metrics;
}

std::optional<double> Training::gradient_norm_of(std::int64_t step) {
  // A step that failed half way may have been the optimizer's last.
  return step == norm_before_.step ? norm_before_.value : typed([&] { return optimizer_->gradient_norm(); });
}

void Training::finish() {
  if (session_) typed([&] { session_->synchronize(); });
}

void Training::write_timeline(const std::filesystem::path& path) {
  if (!session_) throw LogicError("an unmanaged run has no timeline");
  session_->timeline().write(path);
}

/// Returns the mean loss. Nothing of the graphs is left when it returns.
double Training::accumulate_gradients() {
  const auto parts = static_cast<double>(config_.train.accumulate);
  double sum = 0;
  for (std::int64_t part = 0; part < config_.train.accumulate; ++part) {
    const Batch batch = dataset_.training_batch(generator_, config_.train.micro_batch);
    const at::Tensor loss = model_->forward(batch.tokens.to(device_), batch.targets.to(device_));
    sum += static_cast<double>(loss.item<float>());
    (loss / parts).backward();
  }
  return sum / parts;
}

HeldOut Training::evaluate(std::int64_t batches, const std::function<bool()>& stop) {
  const std::int64_t sequences = std::min(config_.train.micro_batch, dataset_.held_out_sequences());
  const std::int64_t count = std::min(batches, dataset_.held_out_sequences() / sequences);
  const torch::NoGradGuard no_gradients;
  ByteCounts bytes;
  HeldOut result;
  double sum = 0;
  std::int64_t done = 0;
  for (; done < count && !stop(); ++done) {
    const Batch batch = dataset_.held_out_batch(done, count, sequences);
    bytes.add(batch.targets);
    sum += typed([&] {
      return static_cast<double>(model_->forward(batch.tokens.to(device_), batch.targets.to(device_)).item<float>());
    });
  }
  result.loss = done > 0 ? sum / static_cast<double>(done) : 0;
  result.byte_entropy = bytes.entropy();
  result.bytes = done * sequences * dataset_.sequence();
  return result;
}

std::string Training::sample(const std::string& prompt, std::int64_t count, const std::function<bool()>& stop) {
  const torch::NoGradGuard no_gradients;
  std::mt19937_64 generator(config_.train.seed);
  std::string text = prompt.empty() ? "\n" : prompt;
  for (std::int64_t i = 0; i < count && !stop(); ++i) {
    text.push_back(static_cast<char>(typed([&] { return next_byte(text, generator); })));
  }
  return text;
}

std::uint8_t Training::next_byte(const std::string& text, std::mt19937_64& generator) {
  const auto seen = std::min<std::int64_t>(static_cast<std::int64_t>(text.size()), config_.model.sequence);
  const at::Tensor tokens = at::empty({1, seen}, at::kLong);
  std::transform(text.end() - seen, text.end(), tokens.mutable_data_ptr<std::int64_t>(),
                 [](char byte) { return static_cast<std::int64_t>(static_cast<std::uint8_t>(byte)); });
  const at::Tensor logits = model_->logits(tokens.to(device_)).select(1, seen - 1).flatten().to(at::kCPU).contiguous();
  const float* values = logits.const_data_ptr<float>();
  const double highest = *std::max_element(values, values + GptOptions::vocabulary);
  std::vector<double> weights(GptOptions::vocabulary);
  double total = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    total += weights[i] = std::exp((static_cast<double>(values[i]) - highest) / kTemperature);
  }
  double left = uniform(generator) * total;
  std::size_t chosen = 0;
  while (chosen + 1 < weights.size() && left >= weights[chosen]) left -= weights[chosen++];
  return static_cast<std::uint8_t>(chosen);
}

std::int64_t Training::parameters() const { return count_parameters(config_.model); }

std::uint64_t Training::state_bytes() const {
  return (Saturating(static_cast<std::uint64_t>(parameters())) * bytes_of_parameter()).value();
}

std::uint64_t Training::bytes_of_parameter() const {
  const at::ScalarType type = config_.model.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
  const at::ScalarType gradient = gradient_type(type, config_.optimizer.accumulate == "float32");
  const StateFormat states = state_format(config_.optimizer.states);
  return c10::elementSize(type) + c10::elementSize(gradient) + master_bytes(states, element_type(type)) +
         2 * bytes_of(moment_type(states));
}

}  // namespace terrace
