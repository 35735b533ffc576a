/// One call of a `block`, as whoever plans for blocks hears of it.
///
/// Threads: a call begins and ends on one; backward may ask for what it has saved on any.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "integration/saved_tensors.h"

namespace terrace {

/// Hears what one call reads and saves, and when backward begins to ask for that.
class BlockMeter {
 public:
  virtual ~BlockMeter() = default;
  virtual void reads(const at::Tensor& input) = 0;
  virtual void saves(const at::Tensor& tensor) = 0;
  virtual void ends() noexcept = 0;
  virtual void asked_for() noexcept = 0;
};

class BlockPlanner {
 public:
  struct Decision {
    bool runs_again = false;            ///< in backward, instead of having what it saves kept
    std::shared_ptr<BlockMeter> meter;  ///< null: nobody wants to hear of it
  };

  virtual ~BlockPlanner() = default;
  /// What becomes of the call that begins now on the calling thread, with so many bytes of tensors.
  virtual Decision begin_call(std::uint64_t given_bytes) = 0;
};

/// Who decides about calls from now on; null: all are called straight through. Whoever asks the one before while it
/// changes keeps it alive for so long.
void set_block_planner(std::shared_ptr<BlockPlanner> planner) noexcept;

/// Around a call. One within another is part of that, and one that records no graph needs no decision.
class BlockCall {
 public:
  /// With so many bytes of tensors.
  explicit BlockCall(std::uint64_t given_bytes);
  ~BlockCall();
  BlockCall(const BlockCall&) = delete;
  BlockCall& operator=(const BlockCall&) = delete;

  bool runs_again() const noexcept { return decision_.runs_again; }
  bool is_metered() const noexcept { return decision_.meter != nullptr; }
  void reads(const at::Tensor& input) { decision_.meter->reads(input); }

 private:
  class Metered;

  BlockPlanner::Decision decision_;
  bool is_outermost_ = false;
  std::unique_ptr<SavedTensorSource> source_;
  std::optional<SavedTensorScope> scope_;
};

}  // namespace terrace
