/// A GPT in training: with a session across the tiers, or unmanaged, as plain LibTorch with everything in memory.
/// The same configuration gives the same losses either way.
///
/// What fails because of the session throws the session's typed error (OutOfMemory, IoError, CorruptData).
/// Not thread-safe.
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <optional>
#include <random>
#include <string>

#include <torch/torch.h>

#include "base/config.h"
#include "base/error.h"
#include "integration/adamw.h"
#include "integration/checkpoint_lock.h"
#include "integration/session.h"
#include "memory/usage.h"
#include "tools/dataset.h"
#include "tools/gpt.h"
#include "tools/metrics.h"

namespace terrace {

/// Of `count` in a schedule of `steps`: a linear warm-up, then a cosine down to a tenth of the highest rate.
double learning_rate_at(const Config::Train& train, std::int64_t step);

class Training {
 public:
  /// Builds the model. `dataset` must outlive this.
  Training(const Config& config, const Dataset& dataset, bool unmanaged);

  /// Without the gradient norm, which is found behind the next step's forward.
  StepMetrics step();
  /// Of the last step, which may have to be waited for, or of the one before it. Throws what its update has failed
  /// with.
  std::optional<double> gradient_norm_of(std::int64_t step);
  /// Waits for the updates that are still queued after the last step: what fails in one is thrown here at the latest.
  void finish();

  /// Saves what the session does and where the data are, after the last step.
  void save(CheckpointLock& lock);
  /// Goes to where the run stood that saved: the next step is the one after its last. Warns where the data, or
  /// settings that losses depend on, are others. Throws what Session::load throws, and ConfigError for a checkpoint of
  /// another program or another model, before anything changes.
  void resume(const std::filesystem::path& folder);

  /// The mean loss over `batches` held-out batches, or as many as there are. Stops early, with what it has, when
  /// `stop` says so.
  HeldOut evaluate(std::int64_t batches, const std::function<bool()>& stop);

  /// `count` bytes that follow the prompt, drawn at a temperature of 0.8. Each prediction sees the last
  /// `model.sequence` bytes. Stops early when `stop` says so.
  std::string sample(const std::string& prompt, std::int64_t count, const std::function<bool()>& stop);

  at::Device device() const noexcept { return device_; }
  std::int64_t steps_done() const noexcept { return steps_done_; }
  /// Of the last step, whichever run made it; 0 before the first.
  double last_loss() const noexcept { return last_loss_; }
  /// So far in this run, as their gradients were not finite.
  std::int64_t skipped_steps() const { return optimizer_->skipped_steps(); }
  std::int64_t parameters() const;
  /// Bytes of parameters, gradients, masters and moments.
  std::uint64_t state_bytes() const;
  /// Throws LogicError where unmanaged, and what Timeline::write throws.
  void write_timeline(const std::filesystem::path& path);
  /// All zero where unmanaged.
  MemoryUsage usage() const { return session_ ? session_->memory_usage() : MemoryUsage{}; }

 private:
  void build();
  std::uint64_t bytes_of_parameter() const;
  double accumulate_gradients();
  /// Counts what was moved and waited for since `before` for no step.
  void leave_out_of_steps(const MemoryUsage& before);
  std::uint8_t next_byte(const std::string& text, std::mt19937_64& generator);
  /// Ops throw LibTorch's errors; why they failed is with the session.
  template <class Function>
  auto typed(Function&& function) {
    try {
      return function();
    } catch (const Error&) {
      throw;
    } catch (const std::exception&) {
      if (session_ && session_->last_error()) std::rethrow_exception(session_->last_error());
      throw;
    }
  }

  const Config config_;
  const Dataset& dataset_;
  std::optional<Session> session_;  // before what it manages, so that it ends after it
  at::Device device_ = at::kCPU;
  Gpt model_{nullptr};
  std::optional<AdamW> optimizer_;
  std::mt19937_64 generator_;  // of what is drawn from the dataset
  std::int64_t steps_done_ = 0;
  double last_loss_ = 0;
  /// Of the step before the one that the optimizer has taken last.
  struct {
    std::int64_t step = 0;
    std::optional<double> value;
  } norm_before_;
  MemoryUsage::AtStepEnd counted_;  // up to the last step's end, with what was left out of the next
};

}  // namespace terrace
