/// One case of `terrace bench activations`: a model, trained with each way to treat its activations in turn.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "integration/activation_planner.h"
#include "memory/activation_plan.h"

namespace terrace {

/// A model whose computation is only waited for (see timed_blocks.h).
struct ActivationSetting {
  std::string name;
  std::vector<BlockProfile> blocks;
  std::uint64_t room_bytes = 0;  ///< of the device, for what blocks save
  double link_rate = 0;          ///< bytes a second, each way
};

std::uint64_t saved_bytes(const ActivationSetting& setting);

/// With one `placement.activations`.
struct ActivationRun {
  std::string activations;
  double seconds = 0;            ///< a step; the median of some
  double left_device_bytes = 0;  ///< of activations, a step
  double reached_device_bytes = 0;
  std::optional<ActivationReport> report{};  ///< of "auto"
};

/// `folder` is where NVMe is. `room_for_all`: the device holds all that is saved. Throws what a session throws.
ActivationRun run_timed_blocks(const ActivationSetting& setting, const std::string& activations, bool room_for_all,
                               const std::filesystem::path& folder);

/// A GPT that computes, beside one that is not managed: forward and backward, of which each call of either lasts some
/// tenths of a second. Its constructor throws LogicError where their losses or gradients differ.
class GptBesideUnmanaged {
 public:
  enum class Activations {
    stay,  ///< all of the GPT is on the device
    move,  ///< of a narrow GPT, which saves much for what it computes, half go to the host and come back
  };
  explicit GptBesideUnmanaged(Activations activations);
  ~GptBesideUnmanaged();
  GptBesideUnmanaged(const GptBesideUnmanaged&) = delete;
  GptBesideUnmanaged& operator=(const GptBesideUnmanaged&) = delete;

  double managed_seconds();
  double unmanaged_seconds();
  /// Bytes of activations that a managed call has last moved, out of the device and into it.
  double left_device_bytes() const;
  double reached_device_bytes() const;

 private:
  struct Sides;
  std::unique_ptr<Sides> sides_;
};

/// Seconds that interception adds to an op, beyond those of a callback for ops' inputs that does nothing.
struct InterceptionCost {
  double of_any_op = 0;      ///< none of whose operands is managed
  double of_managed_op = 0;  ///< one of whose operands is, and is on the device
};
InterceptionCost measure_interception();

/// The best of all plans of a setting, as `play` has it.
struct BestPlan {
  Recomputed recomputed;
  double seconds = 0;  ///< of forward and backward
};
PassProfile profile_of(const ActivationSetting& setting);
BestPlan search_exhaustively(const ActivationSetting& setting);

}  // namespace terrace
