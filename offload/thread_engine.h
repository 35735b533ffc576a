#pragma once

#include <utility>

#include "offload/io_engine.h"
#include "offload/processors.h"

namespace terrace {

/// pread and pwrite on threads of each queue's own, min(depth, 8) of them. Works wherever Linux does.
class ThreadEngine : public IoEngine {
 public:
  /// On these hardware threads.
  explicit ThreadEngine(Processors processors = {}) : processors_(std::move(processors)) {}

  std::string_view name() const noexcept override { return "threads"; }
  std::unique_ptr<IoQueue> open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered = {},
                                      std::span<const IoFile* const> files = {}) override;

 private:
  const Processors processors_;
};

}  // namespace terrace
