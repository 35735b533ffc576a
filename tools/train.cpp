#include "tools/train.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <system_error>

#include "base/error.h"
#include "base/units.h"
#include "tools/dataset.h"
#include "tools/interrupt.h"
#include "tools/metrics.h"
#include "tools/progress.h"
#include "tools/report.h"
#include "tools/training.h"

namespace terrace {
namespace {

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw IoError("making the folder " + folder.string() + " failed: " + error.message(),
                  "give --output a folder that can be written");
  }
}

/// The configuration with the sizes that "auto" stood for.
Config resolved(Config config, const MemoryUsage& usage) {
  const auto fill = [&](std::optional<std::uint64_t>& bytes, Tier tier) {
    if (!bytes && usage.capacity(tier) > 0) bytes = usage.capacity(tier);
  };
  fill(config.device.memory, Tier::device);
  fill(config.host.memory, Tier::host);
  fill(config.nvme.memory, Tier::nvme);
  return config;
}

void announce(const TrainOptions& options, const Training& training, const Dataset& dataset) {
  std::fprintf(stderr, "%lld parameters, training state %s; %s of text to learn, %s held out; %s\n",
               static_cast<long long>(training.parameters()), format_bytes(training.state_bytes()).c_str(),
               format_bytes(dataset.training().size()).c_str(), format_bytes(dataset.held_out().size()).c_str(),
               options.unmanaged ? "unmanaged" : "managed");
}

/// Trains until the last step or an interrupt, and fills in what the steps gave.
void run_steps(Training& training, std::int64_t last_step, const std::vector<std::filesystem::path>& metrics_paths,
               const Interrupt& interrupt, Report& report) {
  std::vector<std::unique_ptr<MetricsFile>> files;
  for (const auto& path : metrics_paths) files.push_back(std::make_unique<MetricsFile>(path));
  Progress progress(stderr, last_step);
  while (training.steps_done() < last_step && !interrupt.requested()) {
    const StepMetrics step = training.step();
    for (const auto& file : files) file->write(step);
    progress.show(step);
    report.steps = step.step;
    report.loss = step.loss;
    report.tokens += step.tokens;
    report.seconds += step.seconds;
    report.stall_seconds += step.stall_seconds;
    for (const Link link : all_links) report.moved_in_steps[index_of(link)] += step.bytes_moved[index_of(link)];
  }
  training.finish();
}

}  // namespace

bool train(const TrainOptions& options) {
  const Config& config = options.config;
  std::vector<std::filesystem::path> metrics_paths;
  if (!options.metrics.empty()) metrics_paths.push_back(options.metrics);
  if (!options.output.empty()) {
    make_folder(options.output);
    metrics_paths.push_back(options.output / "metrics.jsonl");
  }

  const Interrupt interrupt;
  const auto stop = [&] { return interrupt.requested(); };
  const Dataset dataset(config.data.paths, config.model.sequence);
  Training training(config, dataset, options.unmanaged);
  announce(options, training, dataset);
  if (!options.output.empty()) {
    write_file(options.output / "config.toml", to_toml(resolved(config, training.usage())));
  }

  Report report;
  report.managed = !options.unmanaged;
  report.parameters = training.parameters();
  report.state_bytes = training.state_bytes();
  report.planned_steps = std::min(config.train.steps, options.stop_after.value_or(config.train.steps));
  report.threads = at::get_num_threads();
  run_steps(training, report.planned_steps, metrics_paths, interrupt, report);
  if (options.evaluate > 0 && !stop()) {
    const HeldOut held_out = training.evaluate(options.evaluate, stop);
    if (!stop()) report.held_out = held_out;
  }
  if (options.sample > 0 && !stop()) report.sample = training.sample(options.prompt, options.sample, stop);
  report.interrupted = stop();
  report.usage = training.usage();

  std::fputs((options.json ? to_json(report) + "\n" : to_text(report)).c_str(), stdout);
  std::fflush(stdout);
  if (!options.output.empty()) {
    if (report.sample) write_file(options.output / "sample.txt", *report.sample);
    write_file(options.output / "report.json", to_json(report) + "\n");
  }
  if (report.interrupted) {
    std::fprintf(stderr, "terrace: interrupted after step %lld; nothing was saved: there are no checkpoints yet\n",
                 static_cast<long long>(report.steps));
  }
  return !report.interrupted;
}

}  // namespace terrace
