/// Training steps under the policy of residency, in virtual time.
///
/// Says how long a step takes and what it moves, by the policy's schedule and given rates alone. So a test can hold the
/// policy to its floor: the result is the same on every machine, however busy that is.
///
/// The program runs a forward and a backward over all parameters for each micro-batch. It is ahead of computation,
/// waits for operands that are not there, takes room for each new gradient until that is added to its chunk, and reads
/// the loss at the end. Meanwhile updates run in the background, of the chunks of one index at a time and patiently,
/// unless the program waits for one; each ends with the death of its gradient. Copies, links and fences are
/// TimedDriver's.
///
/// Not modelled: activations, what the policy itself takes to decide, that the update and the links share the host's
/// memory, and transfers that fail.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "memory/policy.h"
#include "tests/memory/timed_driver.h"
#include "tests/memory/virtual_links.h"

namespace terrace {

class VirtualStep {
 public:
  static constexpr std::uint64_t chunk_bytes = 32 * VirtualLinks::block_bytes;

  struct Options {
    std::size_t parameter_chunks = 0;
    std::size_t device_chunks = 0;  ///< that fit there
    std::size_t host_chunks = 0;    ///< that fit there beside what rests there
    double nvme_share = 0;          ///< of the parameters that rests on NVMe, where gradients rest too
    bool states_on_nvme = false;    ///< both moments too
    int micro_batches = 1;
    double compute_seconds = 0;  ///< of a step
    double update_seconds = 0;   ///< of all parameters
    std::size_t prefetch_depth = 8;
    VirtualLinks::Options links{};
  };
  struct Measured {
    double seconds = 0;
    std::array<double, link_count> bytes{};
  };

  explicit VirtualStep(const Options& options)
      : options_(options),
        driver_({options.device_chunks * chunk_bytes, host_bytes(options), SimulatedDriver::unlimited},
                options.prefetch_depth, options.links) {
    const std::size_t count = options.parameter_chunks;
    const Tier states = options.states_on_nvme ? Tier::nvme : Tier::host;
    for (std::size_t i = 0; i < count; ++i) momenta_.push_back(add(Kind::momentum, states));
    for (std::size_t i = 0; i < count; ++i) variances_.push_back(add(Kind::variance, states));
    for (std::size_t i = 0; i < count; ++i) gradients_.push_back(add(Kind::gradient, Tier::nvme));
    for (std::size_t i = 0; i < count; ++i) {
      parameters_.push_back(add(Kind::parameter, rests_on_nvme(options, i) ? Tier::nvme : Tier::host));
    }
    for (const auto* chunks : {&momenta_, &variances_, &parameters_}) {
      for (const ChunkId chunk : *chunks) initialize(chunk);
    }
    driver_.set_background([this] { return go_on_with_updates(); });
  }

  /// The mean of a few steps, after those by which one becomes like the next.
  Measured measure() {
    constexpr int first_steps = 3;
    constexpr int measured_steps = 3;
    for (int i = 0; i < first_steps; ++i) step();
    const double begin = seconds_of(driver_.now());
    const auto before = carried();
    for (int i = 0; i < measured_steps; ++i) step();
    Measured mean{(seconds_of(driver_.now()) - begin) / measured_steps, carried()};
    for (std::size_t i = 0; i < link_count; ++i) mean.bytes[i] = (mean.bytes[i] - before[i]) / measured_steps;
    return mean;
  }

 private:
  using Call = SimulatedDriver::Call;

  /// Of the chunks of one index.
  struct Update {
    std::size_t index = 0;
    Call* call = nullptr;
    VirtualTime end = TimedDriver::never;  ///< known once it has its operands
  };

  static bool rests_on_nvme(const Options& options, std::size_t index) {
    const auto on_nvme = [&](std::size_t until) { return std::floor(static_cast<double>(until) * options.nvme_share); };
    return on_nvme(index + 1) > on_nvme(index);
  }
  static std::uint64_t host_bytes(const Options& options) {
    std::uint64_t chunks = options.host_chunks + (options.states_on_nvme ? 0 : 2 * options.parameter_chunks);
    for (std::size_t i = 0; i < options.parameter_chunks; ++i) chunks += rests_on_nvme(options, i) ? 0 : 1;
    return chunks * chunk_bytes;
  }

  ChunkId add(Kind kind, Tier home) {
    return driver_.add_chunk({.kind = kind,
                              .index = static_cast<std::uint32_t>(driver_.policy().chunk_count()),
                              .bytes = chunk_bytes,
                              .home = home,
                              .room_bytes = {chunk_bytes, chunk_bytes, chunk_bytes}});
  }
  void initialize(ChunkId chunk) {
    Call& call = driver_.acquire({{chunk, Tier::host, Access::write}});
    driver_.await(call);
    release(call);
  }
  void release(Call& call) {
    driver_.release(call);
    driver_.settle();
  }
  std::array<double, link_count> carried() const {
    std::array<double, link_count> bytes{};
    for (const Link link : all_links) bytes[index_of(link)] = static_cast<double>(driver_.links().carried_bytes(link));
    return bytes;
  }

  // --- the program ---

  void step() {
    for (int i = 0; i < options_.micro_batches; ++i) {
      driver_.begin_pass(1);
      driver_.settle();
      forward();
      backward();
    }
    queue_updates();
    driver_.step_mark();
    driver_.settle();
    driver_.run_until(driver_.computed());  // the loss is read
  }

  /// Most chunks hold one tensor, every third holds two: the part that each takes.
  static std::vector<double> tensors_of(std::size_t index) {
    return index % 3 == 0 ? std::vector{0.75, 0.25} : std::vector{1.0};
  }
  /// What forward computes with a part of a chunk; backward computes twice as much.
  VirtualTime forward_time(double part) const {
    const double pieces = 3.0 * options_.micro_batches * static_cast<double>(options_.parameter_chunks);
    return virtual_seconds(part * options_.compute_seconds / pieces);
  }

  void forward() {
    for (std::size_t i = 0; i < options_.parameter_chunks; ++i) {
      for (const double part : tensors_of(i)) use_parameters(i, forward_time(part));
    }
  }
  void backward() {
    for (std::size_t i = options_.parameter_chunks; i-- > 0;) {
      const std::vector<double> parts = tensors_of(i);
      for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
        use_parameters(i, 2 * forward_time(*part));
        add_gradient(i);
      }
    }
  }

  void use_parameters(std::size_t index, VirtualTime time) {
    await_update(index);
    use({parameters_[index], Tier::device, Access::read}, time);
  }
  void add_gradient(std::size_t index) {
    await_update(index);
    Call& made = driver_.allocate(chunk_bytes);
    driver_.await(made);
    use({gradients_[index], Tier::device, Access::write}, VirtualTime{});
    release(made);
  }
  void use(const ChunkAccess& access, VirtualTime time) {
    Call& call = driver_.acquire({access});
    driver_.await(call);
    driver_.compute(access.chunk, time);
    release(call);
    constexpr VirtualTime launch = std::chrono::microseconds(20);
    driver_.run_until(driver_.now() + launch);
  }

  // --- updates ---

  void queue_updates() {
    while (!updates_.empty()) await_update(updates_.front());  // of the step before
    std::vector<ChunkId> announced;
    for (std::size_t i = 0; i < options_.parameter_chunks; ++i) {
      updates_.push_back(i);
      for (const ChunkId chunk : {parameters_[i], gradients_[i], momenta_[i], variances_[i]}) {
        announced.push_back(chunk);
        driver_.set_update_queued(chunk, true);
      }
    }
    driver_.announce(std::move(announced));
    driver_.settle();
    driver_.go_on_in_background();
  }
  void await_update(std::size_t index) {
    if (std::find(updates_.begin(), updates_.end(), index) == updates_.end()) return;
    awaited_update_ = index;
    driver_.set_updates_awaited(true);
    driver_.settle();
    driver_.go_on_in_background();
    driver_.run_until([&] { return !awaited_update_; });
    driver_.set_updates_awaited(false);
    driver_.settle();
  }

  /// Until when it has nothing more to do.
  VirtualTime go_on_with_updates() {
    while (!updates_.empty()) {
      if (!update_) begin_update();
      if (update_->call->waiting()) return TimedDriver::never;
      TimedDriver::require_granted(*update_->call);
      if (update_->end == TimedDriver::never) {
        const auto count = static_cast<double>(options_.parameter_chunks);
        update_->end = driver_.now() + virtual_seconds(options_.update_seconds / count);
      }
      if (driver_.now() < update_->end) return update_->end;
      end_update();
    }
    return TimedDriver::never;
  }
  std::vector<ChunkAccess> accesses_of_update(std::size_t i) const {
    return {{parameters_[i], Tier::host, Access::write},
            {gradients_[i], Tier::host, Access::read},
            {momenta_[i], Tier::host, Access::write},
            {variances_[i], Tier::host, Access::write}};
  }
  /// Of what the program waits for, or else of what UpdateQueue would choose.
  void begin_update() {
    constexpr std::size_t sets_looked_at = 4;  // as in optimizer/update_queue.cpp
    const auto looked_at = std::find_if(updates_.begin(), updates_.end(),
                                        [&](std::size_t i) { return i >= updates_.front() + sets_looked_at; });
    const auto at_hand = std::find_if(updates_.begin(), looked_at,
                                      [&](std::size_t i) { return driver_.policy().can_grant(accesses_of_update(i)); });
    const std::size_t i = awaited_update_.value_or(at_hand != looked_at ? *at_hand : updates_.front());
    const std::vector<ChunkAccess> accesses = accesses_of_update(i);
    update_ = {.index = i, .call = awaited_update_ ? &driver_.acquire(accesses) : &driver_.acquire_patiently(accesses)};
    driver_.settle();
  }
  void end_update() {
    const std::size_t i = update_->index;
    driver_.discard(gradients_[i]);
    driver_.release(*update_->call);
    for (const ChunkId chunk : {parameters_[i], momenta_[i], variances_[i]}) driver_.set_update_queued(chunk, false);
    driver_.settle();
    update_.reset();
    updates_.erase(std::find(updates_.begin(), updates_.end(), i));
    if (awaited_update_ == i) awaited_update_.reset();
  }

  const Options options_;
  TimedDriver driver_;
  std::vector<ChunkId> parameters_, gradients_, momenta_, variances_;  ///< by index
  std::deque<std::size_t> updates_;            ///< indices of what is queued, with the one that runs
  std::optional<Update> update_;               ///< that runs
  std::optional<std::size_t> awaited_update_;  ///< by the program
};

}  // namespace terrace
