/// Random training through the policy machine, with its invariants and a model of the contents checked after each
/// event: forward, backward and an update in the background that is patient until somebody awaits it, over random
/// sizes, homes and budgets. Whoever asks is granted, and what goes on by itself ends.
///
/// TERRACE_TEST_SEED repeats a run.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "memory/policy.h"
#include "tests/memory/prefetch_world.h"
#include "tests/memory/seed.h"
#include "tests/memory/simulated_driver.h"

namespace terrace {
namespace {

using Call = SimulatedDriver::Call;

constexpr int models = 400;
constexpr int steps_of_each = 6;
constexpr std::uint64_t unit = 1024;
/// Far more events than anything takes that ends.
constexpr int endless = 20'000;

/// What is updated together.
struct Layer {
  std::uint64_t units = 0;
  ChunkId parameter = 0;
  ChunkId gradient = 0;
  ChunkId momentum = 0;
  ChunkId variance = 0;

  std::vector<ChunkId> chunks() const { return {parameter, gradient, momentum, variance}; }
  std::vector<ChunkAccess> update() const {
    return {
        {parameter, host, writing}, {gradient, host, reading}, {momentum, host, writing}, {variance, host, writing}};
  }
};

/// One random model, how its budgets bear on it, and its training.
class Training {
 public:
  explicit Training(std::uint64_t seed)
      : random_(seed),
        layers_(random_layers()),
        homes_(random_homes()),
        driver_(capacity(), unlimited(), 1 + below(6)) {
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      Layer& layer = layers_[i];
      const auto add = [&](Kind kind, Tier home) {
        const std::uint64_t bytes = layer.units * unit;
        return driver_.add_chunk({.kind = kind,
                                  .index = static_cast<std::uint32_t>(i),
                                  .bytes = bytes,
                                  .home = home,
                                  .room_bytes = {bytes, bytes, bytes}});
      };
      layer.parameter = add(Kind::parameter, homes_.parameters);
      layer.gradient = add(Kind::gradient, homes_.gradients);
      layer.momentum = add(Kind::momentum, homes_.states);
      layer.variance = add(Kind::variance, homes_.states);
    }
    for (const Layer& layer : layers_) driver_.write(layer.parameter, host);
  }

  void run() {
    for (int step = 0; step < steps_of_each; ++step) {
      if (one_in(6)) evaluate();
      forward_and_backward();
      for (const Layer& layer : layers_) waited_ = waited_ || driver_.policy().chunk(layer.gradient).waits_for_update;
      finish_updates();
      begin_updates();
      if (one_in(3)) update_out_of_turn();
      if (one_in(2)) work_in_background();
      driver_.step_mark();
      if (one_in(6)) evaluate();
      work_in_background();
      come_to_rest();
      work_in_background();
    }
    finish_updates();
    come_to_rest();
  }
  bool gradients_waited() const { return waited_; }

 private:
  struct Homes {
    Tier parameters;
    Tier gradients;
    Tier states;
  };

  static std::uint64_t unlimited() { return SimulatedDriver::unlimited; }
  std::uint64_t below(std::uint64_t end) { return random_() % end; }
  bool one_in(std::uint64_t count) { return below(count) == 0; }

  std::vector<Layer> random_layers() {
    std::vector<Layer> layers(3 + below(8));
    for (Layer& layer : layers) layer.units = 1 + below(4);
    return layers;
  }
  Homes random_homes() { return {one_in(3) ? host : nvme, one_in(2) ? host : nvme, one_in(4) ? host : nvme}; }
  std::array<std::uint64_t, tier_count> capacity() {
    std::uint64_t all = 0;
    std::uint64_t largest = 0;
    for (const Layer& layer : layers_) {
      all += layer.units;
      largest = std::max(largest, layer.units);
    }
    const auto rests = [&](Tier home) { return home == host ? all : 0; };
    const std::uint64_t resting = rests(homes_.parameters) + rests(homes_.gradients) + 2 * rests(homes_.states);
    return {(2 * largest + 2 + below(2 * all)) * unit, (resting + 4 * largest + below(3 * all)) * unit, 100'000 * unit};
  }

  // --- what goes on by itself ---

  /// One thing that is under way ends; false where nothing is.
  bool one_event() {
    if (driver_.idle()) return false;
    const std::size_t transfers = driver_.in_flight().size();
    const std::size_t which = below(transfers + driver_.unreported_vacates());
    which < transfers ? driver_.finish(which) : driver_.report_vacate(which - transfers);
    return true;
  }

  void come_to_rest() {
    for (int events = 0; one_event(); ++events) {
      if (events == endless) throw std::runtime_error("transfers go on without end");
    }
  }

  /// Events, and the background's work between them, until `stop()`.
  template <class Stop>
  void go_on_until(Stop&& stop) {
    for (int events = 0; !stop(); ++events) {
      const bool went_on = one_event();
      work_in_background();
      if (events == endless || (!went_on && !stop() && driver_.idle())) throw std::runtime_error("a wait has no end");
    }
  }

  // --- the update ---

  void begin_updates() {
    order_.clear();
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (i != skipped_) order_.push_back(i);
    }
    if (one_in(4)) std::shuffle(order_.begin(), order_.end(), random_);
    norms_ = one_in(2) ? 0 : order_.size();
    next_ = 0;
    std::vector<ChunkId> announced;
    for (std::size_t i = norms_; i < order_.size(); ++i) announced.push_back(layers_[order_[i]].gradient);
    for (const std::size_t i : order_) {
      owed_.insert(i);
      for (const ChunkId chunk : layers_[i].chunks()) {
        announced.push_back(chunk);
        driver_.set_update_queued(chunk, true);
      }
    }
    driver_.announce(announced);
  }

  /// As far as it comes without waiting.
  void work_in_background() {
    for (;;) {
      if (background_ != nullptr && background_->granted()) {
        Call& ended = *std::exchange(background_, nullptr);
        if (norms_ < order_.size()) {
          driver_.release(ended);
          ++norms_;
        } else {
          end_update(order_[next_++], ended);
        }
      }
      if (background_ != nullptr) return;
      while (next_ < order_.size() && !owed_.contains(order_[next_])) ++next_;
      if (norms_ < order_.size()) {
        background_ = &driver_.acquire_patiently({{layers_[order_[norms_]].gradient, host, reading}});
      } else if (next_ < order_.size()) {
        background_ = &driver_.acquire_patiently(layers_[order_[next_]].update());
      } else {
        return;
      }
    }
  }

  void end_update(std::size_t layer, Call& call) {
    driver_.discard(layers_[layer].gradient);
    driver_.release(call);
    driver_.set_update_queued(layers_[layer].parameter, false);
    owed_.erase(layer);
  }

  /// The program comes to need one of the later ones first, such as to read a parameter.
  void update_out_of_turn() {
    norms_ = order_.size();
    const std::size_t layer = order_[below(order_.size())];
    Call& call = driver_.acquire(layers_[layer].update());
    for (int events = 0; call.waiting(); ++events) {
      if (events == endless || !one_event()) throw std::runtime_error("an update out of turn waits without end");
    }
    end_update(layer, call);
  }

  template <class Stop>
  void await_updates(Stop&& stop) {
    if (stop()) return;
    driver_.set_updates_awaited(true);
    work_in_background();
    go_on_until(stop);
    driver_.set_updates_awaited(false);
  }
  void finish_updates() {
    await_updates([&] { return owed_.empty() && background_ == nullptr; });
  }

  // --- the program ---

  void use(std::size_t layer, const std::vector<ChunkAccess>& accesses) {
    await_updates([&] { return !owed_.contains(layer); });
    Call& call = driver_.acquire(accesses);
    go_on_until([&] { return !call.waiting(); });
    for (std::uint64_t events = below(4); events > 0; --events) one_event();
    driver_.release(call);
    work_in_background();
    for (std::uint64_t events = below(6); events > 0; --events) one_event();
  }

  void forward_and_backward() {
    driver_.begin_pass(1);
    skipped_ = one_in(5) ? below(layers_.size()) : layers_.size();
    for (std::uint64_t batches = 1 + below(2); batches > 0; --batches) {
      for (std::size_t i = 0; i < layers_.size(); ++i) {
        if (i != skipped_) use(i, {{layers_[i].parameter, device, reading}});
      }
      for (std::size_t i = layers_.size(); i-- > 0;) {
        if (i != skipped_) use(i, {{layers_[i].parameter, device, reading}, {layers_[i].gradient, device, writing}});
      }
    }
  }

  void evaluate() {
    driver_.begin_pass(2);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (one_in(2)) continue;
      use(i, {{layers_[i].parameter, device, reading}});
      if (one_in(2)) come_to_rest();
    }
    driver_.step_mark();
  }

  std::mt19937_64 random_;
  std::vector<Layer> layers_;
  const Homes homes_;
  SimulatedDriver driver_;
  bool waited_ = false;             ///< a gradient, on the device for its update
  std::size_t skipped_ = 0;         ///< the layer that this step does not use
  std::vector<std::size_t> order_;  ///< of the layers of the latest update
  std::set<std::size_t> owed_;      ///< of those, which are not updated
  std::size_t norms_ = 0;           ///< up to here of the order the norm was taken
  std::size_t next_ = 0;            ///< up to here of the order the background has come
  Call* background_ = nullptr;      ///< what it waits for
};

TEST(Replay, a_random_training_is_granted_all_and_comes_to_rest) {
  const std::uint64_t first = test_seed();
  int waited = 0;
  for (std::uint64_t seed = first; seed < first + models; ++seed) {
    try {
      Training training(seed);
      training.run();
      waited += training.gradients_waited() ? 1 : 0;
    } catch (const std::exception& error) {
      FAIL() << error.what() << "; TERRACE_TEST_SEED=" << seed << " repeats it";
    }
  }
  EXPECT_GT(waited, models / 50) << "gradients wait on the device for their update in about one of seven";
}

}  // namespace
}  // namespace terrace
