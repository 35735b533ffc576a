#include "tools/update_case.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/memory_info.h"
#include "base/units.h"
#include "integration/adamw.h"
#include "integration/session.h"
#include "offload/core_shares.h"
#include "offload/emulated_computation.h"
#include "offload/extent_format.h"
#include "optimizer/update_threads.h"
#include "tools/bare_nvme.h"
#include "tools/bench_case.h"
#include "tools/bench_session.h"
#include "tools/stand_in.h"
#include "tools/update_arrays.h"
#include "tools/update_traffic.h"

namespace terrace {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;
constexpr double kDeviceBytes = 64 * kMiB;
/// What the host has room for beside parameters and gradients: states on their way.
constexpr double kHostRoom = 64 * kMiB;
constexpr double kSlack = 1.02;  // that chunks round up
constexpr int kTimed = 2;        // updates, or steps, of a sample
constexpr int kCalibrations = 3;
constexpr std::size_t kRecent = 5;  // updates, of which the median says how long computation is to be
constexpr std::int64_t kQuietNs = 20'000'000;

GptOptions model_options(const UpdateSetting& setting) {
  return {.layers = setting.layers, .heads = 8, .width = 512, .sequence = 64};
}

Gpt make_model(const UpdateSetting& setting) {
  Gpt model(model_options(setting));
  if (setting.type == ElementType::bfloat16) model->to(at::kBFloat16);
  return model;
}

double elements_with(UpdateSetting setting, std::int64_t layers) {
  setting.layers = layers;
  double elements = 0;
  const Gpt model(model_options(setting));
  for (const at::Tensor& parameter : model->parameters()) elements += static_cast<double>(parameter.numel());
  return elements;
}

/// Without making the whole model, for which there may not be the memory.
double elements_of(const UpdateSetting& setting) {
  const double one_layer = elements_with(setting, 1);
  return one_layer + static_cast<double>(setting.layers - 1) * (elements_with(setting, 2) - one_layer);
}

std::uint64_t whole(double bytes) { return static_cast<std::uint64_t>(bytes); }

double state_bytes(const UpdateSetting& setting) {
  const StateFormat format = state_format(setting.states);
  return static_cast<double>(master_bytes(format, setting.type) + 2 * bytes_of(moment_type(format)));
}

Config config_of(const UpdateSetting& setting, double elements) {
  const double parameters = static_cast<double>(bytes_of(setting.type)) * elements;
  const double states = state_bytes(setting) * elements;
  Config config;
  config.device.kind = "emulated";
  config.device.memory = whole(kDeviceBytes);
  config.host.memory = whole(2 * parameters * kSlack + kHostRoom);
  config.nvme.paths = {setting.folder};
  config.nvme.memory = whole(states * kSlack + 64 * kMiB);
  config.placement.parameters = Config::Shares{.host = 1};
  config.placement.gradients = Config::Shares{.host = 1};
  config.placement.optimizer = Config::Shares{.nvme = 1};
  config.placement.activations = "keep";
  config.optimizer.states = setting.states;
  config.log.level = LogLevel::warning;
  config.validate();
  return config;
}

void require_memory(const Config& config, double arrays) {
  const auto needed = static_cast<double>(*config.host.memory + *config.device.memory) + arrays;
  const std::uint64_t available = available_memory_bytes();
  if (needed <= static_cast<double>(available)) return;
  throw OutOfMemory("bench: the model and the arrays that it is compared with take " + format_bytes(whole(needed)) +
                        ", and " + format_bytes(available) + " of memory are available",
                    "lower --layers");
}

/// Where a session of this process has its extents in that folder: in the file of such that is open.
BareNvme::Part extents_in(const std::filesystem::path& folder) {
  const std::filesystem::path canonical = std::filesystem::canonical(folder);
  for (const auto& open : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed_meanwhile;
    std::filesystem::path file = std::filesystem::read_symlink(open, closed_meanwhile);
    if (file.parent_path() == canonical && file.extension() == ".extents") {
      return {std::move(file), ExtentFileHeader::kBytes};
    }
  }
  throw LogicError("bench: no file of this process is open in " + folder.string() + ", where states are");
}

/// A managed stand-in whose states rest on NVMe.
class Model {
 public:
  Model(const UpdateSetting& setting, const Config& config, std::vector<RecordedUse> uses) : session_(config) {
    with_typed_errors(session_, [&] {
      Gpt model = session_.construct([&] { return make_model(setting); });
      session_.manage(*model);
      parameters_ = model->parameters();
      // A learning rate of 0 leaves parameters, and so what forward returns, as they are; the update costs the same.
      optimizer_.emplace(session_, torch::optim::AdamWOptions(0.0));
      stand_in_.emplace(model, std::move(uses));
      require_gradients();
      update();
      update();
      session_.synchronize();
    });
  }

  /// Of one update, from `step()` to its end, where one follows the other.
  double update_seconds() {
    return with_typed_errors(session_, [&] {
      settle();
      require_gradients();
      update();
      const MemoryUsage before = session_.memory_usage();
      const Stopwatch watch;
      for (int i = 0; i < kTimed; ++i) update();
      const double seconds = watch.elapsed_seconds() / kTimed;
      traffic_.add(before, session_.memory_usage(), kTimed);
      settle();
      return seconds;
    });
  }

  /// Of a step that computes for so long in forward alone, and whose gradients are there already.
  double forward_seconds(double compute_seconds, bool with_update) {
    return steps_seconds(compute_seconds / StandIn::forward_share, [&] {
      forward();
      wait_for_device();  // gradients are there no sooner
      std::vector<at::Tensor> gradients;
      if (!with_update) gradients = take_gradients();
      optimizer_->step();
      for (std::size_t i = 0; i < gradients.size(); ++i) parameters_[i].mutable_grad() = gradients[i];
    });
  }

  /// Of a step that computes for so long in forward and backward.
  double step_seconds(double compute_seconds, bool with_update) {
    return steps_seconds(compute_seconds, [&] {
      forward().backward();
      if (!with_update) optimizer_->zero_grad();
      optimizer_->step();
      optimizer_->zero_grad();
    });
  }

  double elements() const { return static_cast<double>(stand_in_->elements()); }
  const StepTraffic& traffic() const { return traffic_; }
  void forget_traffic() { traffic_ = {}; }

 private:
  template <class Step>
  double steps_seconds(double compute_seconds, Step&& step) {
    return with_typed_errors(session_, [&] {
      settle();
      require_gradients();
      stand_in_->set_compute_seconds(compute_seconds);
      step();
      wait_for_device();
      const Stopwatch watch;
      for (int i = 0; i < kTimed; ++i) {
        step();
        wait_for_device();  // as whoever reads the loss does
      }
      const double seconds = watch.elapsed_seconds() / kTimed;
      settle();
      return seconds;
    });
  }

  void update() {
    optimizer_->step();
    session_.synchronize();
  }

  at::Tensor forward() {
    at::Tensor loss = stand_in_->forward();
    const auto value = loss.item<float>();
    if (loss_ && *loss_ != value) {
      throw LogicError("bench: the sum over the parameters changed from " + std::to_string(*loss_) + " to " +
                       std::to_string(value) + ", and nothing has changed them");
    }
    loss_ = value;
    return loss;
  }

  static void wait_for_device() { EmulatedComputation::of_this_process().wait(); }

  void require_gradients() {
    if (parameters_.front().grad().defined()) return;
    stand_in_->set_compute_seconds(0);
    forward().backward();
  }

  /// They go on living: what is put back is where it was.
  std::vector<at::Tensor> take_gradients() {
    std::vector<at::Tensor> gradients;
    for (at::Tensor& parameter : parameters_) gradients.push_back(std::exchange(parameter.mutable_grad(), {}));
    return gradients;
  }

  /// Until nothing moves any more: what is done ahead of the next update would count as another side's time.
  void settle() {
    session_.synchronize();
    std::uint64_t before = ~std::uint64_t{0};
    for (std::uint64_t moved = moved_bytes(); moved != before; moved = moved_bytes()) {
      before = moved;
      sleep_until(monotonic_ns() + kQuietNs);
    }
  }

  std::uint64_t moved_bytes() const {
    const MemoryUsage usage = session_.memory_usage();
    std::uint64_t moved = 0;
    for (const Link link : all_links) moved += usage.moved(link);
    return moved;
  }

  Session session_;
  std::vector<at::Tensor> parameters_;
  std::optional<AdamW> optimizer_;
  std::optional<StandIn> stand_in_;
  std::optional<float> loss_;
  StepTraffic traffic_;
};

/// The latest times of the update alone.
class Updates {
 public:
  explicit Updates(Model& model) : model_(model) {}

  double measure() {
    all_.push_back(model_.update_seconds());
    return all_.back();
  }
  double recent() const {
    const std::size_t count = std::min(kRecent, all_.size());
    return median_of({all_.end() - static_cast<std::ptrdiff_t>(count), all_.end()});
  }

 private:
  Model& model_;
  std::vector<double> all_;
};

/// `step(compute_seconds, with_update)` takes a step.
template <class Step>
HiddenUpdate measure_hidden(Updates& updates, const PairOptions& options, Step&& step) {
  std::vector<double> with_update;
  std::vector<double> without;
  std::vector<double> compute;
  std::vector<double> alone;
  step(update_compute_share * updates.recent(), true);  // the first steps of another program run ahead of nothing
  const Comparison exposed = compare_in_pairs(
      options,
      [&] {
        compute.push_back(update_compute_share * updates.recent());
        const bool with_first = with_update.size() % 4 < 2;
        if (with_first) with_update.push_back(step(compute.back(), true));
        without.push_back(step(compute.back(), false));
        if (!with_first) with_update.push_back(step(compute.back(), true));
        return with_update.back() - without.back();
      },
      [&] {
        alone.push_back(updates.measure());
        return alone.back();
      });
  HiddenUpdate result;
  result.pairs = exposed.ratios.size();
  if (result.pairs == 0) return result;
  result.with_seconds = median_of(with_update);
  result.without_seconds = median_of(without);
  result.compute_over_update = median_of(compute) / median_of(alone);
  result.hidden = {.low = 1 - exposed.ratio.high, .median = 1 - exposed.ratio.median, .high = 1 - exposed.ratio.low};
  result.verdict = exposed.verdict;
  return result;
}

/// Passes over the arrays in step with the drive's loop, as an update goes over what has come: over the last part after
/// the last block. Told to stop, it goes over what belongs to the blocks that were moved.
void pass_in_step(const UpdateRun& run, const UpdateThreads& threads, const BareNvmeBesideChecksums& drive,
                  std::uint64_t moved_before, std::size_t elements_at_once, const std::stop_token& stop) {
  const double blocks_an_element = static_cast<double>(drive.blocks()) / static_cast<double>(run.count);
  for (std::size_t first = 0; first < run.count;) {
    const std::size_t count = std::min(elements_at_once, run.count - first);
    const std::uint64_t needed = whole(blocks_an_element * static_cast<double>(first + count));
    if (!drive.loop().wait_until_moved(moved_before + needed, stop)) return;
    pass_over(part_of(run, first, count), threads);
    first += count;
  }
}

/// Against the floors, each a loop of its own that knows nothing of chunks and sessions. Those of the drive go over the
/// states where they are: drives, and what lies under them, are not equally fast everywhere.
void measure_fraction(Updates& updates, const BareNvme::Part& states, const UpdateArrays& arrays,
                      std::size_t elements_of_chunk, const UpdateThreads& threads, PairOptions options,
                      UpdateCase& result) {
  const BareNvme::Options in_place{
      .block_bytes = result.block_bytes, .depth = static_cast<unsigned>(result.depth), .in_place = true};
  BareNvmeBesideChecksums beside(states, whole(result.read_bytes), whole(result.written_bytes), in_place);
  BareNvme& drive = beside.loop();
  std::vector<double> nvme;
  std::vector<double> dram;
  std::vector<double> together;
  std::vector<double> seconds;
  options.target = Target{Target::Sense::at_least, update_fraction_target};
  const Comparison comparison = compare_in_pairs(
      options,
      [&] {
        drive.load();
        nvme.push_back(drive.seconds(whole(result.read_bytes), whole(result.written_bytes)));
        const Stopwatch watch;
        pass_over(arrays.run(), threads);
        dram.push_back(watch.elapsed_seconds());
        drive.load();
        const Stopwatch both;
        std::jthread passing([&, before = drive.blocks_moved()](const std::stop_token& stop) {
          pass_in_step(arrays.run(), threads, beside, before, elements_of_chunk, stop);
        });
        beside.seconds();
        passing.request_stop();
        passing.join();
        together.push_back(both.elapsed_seconds());
        return std::max(nvme.back(), dram.back());
      },
      [&] {
        seconds.push_back(updates.measure());
        return seconds.back();
      });
  result.pairs = comparison.ratios.size();
  if (result.pairs == 0) return;
  result.seconds = median_of(seconds);
  result.nvme_floor_seconds = median_of(nvme);
  result.dram_floor_seconds = median_of(dram);
  result.together_seconds = median_of(together);
  std::vector<double> shares;
  for (std::size_t i = 0; i < result.pairs; ++i) shares.push_back(together.at(i) / seconds.at(i));
  result.fraction_of_together = median_interval(shares);
  result.fraction = comparison.ratio;
  result.verdict = comparison.verdict;
}

}  // namespace

UpdateCase measure_update(const UpdateSetting& setting, const PairOptions& options) {
  const ThreadsOfLibTorch one_thread(1);
  const double elements = elements_of(setting);
  const Config config = config_of(setting, elements);
  const auto parameter_bytes = static_cast<double>(bytes_of(setting.type));
  // The arrays, what the drive's loop reads and writes, and what checksums are taken of.
  require_memory(config, (2 * parameter_bytes + 5 * state_bytes(setting)) * elements);
  const MemoryPlan plan = plan_of(config);
  UpdateCase result;
  result.setting = setting;
  result.parameters = whole(elements);
  result.state_bytes = whole(state_bytes(setting) * elements);
  result.host_bytes = *config.host.memory;
  result.block_bytes = plan.granule_bytes;
  result.depth = plan.nvme_depth;
  result.threads = share_cores(at::get_num_threads(), std::nullopt).update_threads;
  Model model(setting, config, record_uses(model_options(setting)));
  Updates updates(model);
  for (int i = 0; i < kCalibrations; ++i) {
    if (i == 1) model.forget_traffic();
    updates.measure();
  }
  // What is moved more than once is the session's own doing.
  result.read_bytes = std::min(model.traffic().moved(Link::nvme_to_host), static_cast<double>(result.state_bytes));
  result.written_bytes = std::min(model.traffic().moved(Link::host_to_nvme), static_cast<double>(result.state_bytes));
  const UpdateThreads threads(result.threads);
  const UpdateArrays arrays(setting.type, setting.type, state_format(setting.states), result.parameters);
  measure_fraction(updates, extents_in(setting.folder), arrays, plan.chunk_bytes / bytes_of(setting.type), threads,
                   options, result);
  PairOptions hidden = options;
  hidden.target = std::nullopt;
  result.behind_step = measure_hidden(updates, hidden, [&](double compute_seconds, bool with_update) {
    return model.step_seconds(compute_seconds, with_update);
  });
  hidden.target = Target{Target::Sense::at_most, 1 - update_hidden_target};
  result.behind_forward = measure_hidden(updates, hidden, [&](double compute_seconds, bool with_update) {
    return model.forward_seconds(compute_seconds, with_update);
  });
  return result;
}

}  // namespace terrace
