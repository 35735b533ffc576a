#include "tools/train.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/memory_info.h"
#include "base/units.h"
#include "integration/checkpoint_lock.h"
#include "integration/checkpoint_reader.h"
#include "integration/checkpoint_writer.h"
#include "tools/dataset.h"
#include "tools/interrupt.h"
#include "tools/metrics.h"
#include "tools/progress.h"
#include "tools/report.h"
#include "tools/run_files.h"
#include "tools/terminal.h"
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

void require_session_for_checkpoints(const TrainOptions& options) {
  const char* const option = !options.save.empty() ? "--save" : !options.resume.empty() ? "--resume" : nullptr;
  if (options.unmanaged && option != nullptr) {
    throw ConfigError(std::string(option) + " does not go with --unmanaged: checkpoints are a session's",
                      "train without --unmanaged");
  }
  if (options.save_every && options.save.empty()) {
    throw ConfigError("--save-every says how often, and not where to save", "add --save FOLDER");
  }
}

/// What is kept for --timeline where the configuration says nothing: minutes of a run, and little of the host's budget.
std::uint64_t timeline_memory(std::uint64_t host_memory) {
  constexpr std::uint64_t most = std::uint64_t{16} << 20U;
  constexpr std::uint64_t page = 4096;  // sizes that are told are shorter so
  return std::clamp(host_memory / 16 / page * page, Config::Timeline::least_memory, most);
}

/// The configuration that the run has, with room for the timeline if one is to be written.
Config with_timeline(Config config, const TrainOptions& options) {
  if (options.timeline.empty()) return config;
  if (options.unmanaged) {
    throw ConfigError("--timeline does not go with --unmanaged: it is a session that has one",
                      "train without --unmanaged");
  }
  if (config.timeline.memory == 0) {
    throw ConfigError("--timeline is given, and timeline.memory (0B) keeps nothing", "give timeline.memory a size");
  }
  if (!config.timeline.memory) {
    config.timeline.memory = timeline_memory(config.host.memory.value_or(available_memory_bytes() / 4));
  }
  return config;
}

/// What cannot be written is told before there is anything to lose. A file that is not there yet is not there after.
void require_can_write(const std::string& what, const std::filesystem::path& path) {
  std::error_code error;
  if (path.empty() || std::filesystem::is_other(path, error)) return;  // whose reader would take it for the end
  const bool is_new = std::filesystem::symlink_status(path, error).type() == std::filesystem::file_type::not_found;
  errno = 0;
  if (!std::ofstream(path, std::ios::binary | std::ios::app)) {
    throw IoError(what + ": opening " + path.string() + " failed: " + std::generic_category().message(errno),
                  "give a path that can be written, on a disk with free space");
  }
  if (is_new) std::filesystem::remove(path, error);
}

/// The timeline's file, which is written at the end; and where the run fails, as far as that goes.
class TimelineFile {
 public:
  TimelineFile(std::filesystem::path path, Training& training) : path_(std::move(path)), training_(&training) {}
  TimelineFile(const TimelineFile&) = delete;
  TimelineFile& operator=(const TimelineFile&) = delete;
  ~TimelineFile() {
    try {
      write();
    } catch (const std::exception& error) {
      log(LogLevel::warning, error.what());
    }
  }

  /// Only once.
  void write() {
    if (Training* const training = std::exchange(training_, nullptr); training != nullptr && !path_.empty()) {
      training->write_timeline(path_);
    }
  }

 private:
  const std::filesystem::path path_;
  Training* training_;
};

/// The folder to save to, for this run alone until it ends; nothing where none is to be saved to. What cannot be saved
/// is told before there is anything to lose.
std::optional<CheckpointLock> lock_for_saving(const TrainOptions& options) {
  if (options.save.empty()) return std::nullopt;
  std::optional<CheckpointLock> lock(std::in_place, checkpoint_files(), options.save);
  std::error_code error;
  const bool is_resumed = !options.resume.empty() && std::filesystem::equivalent(options.resume, options.save, error);
  if (!is_resumed && std::filesystem::exists(lock->folder().manifest_path(), error)) {
    throw ConfigError("--save: " + options.save.string() + " holds a checkpoint, which this run would replace",
                      "add --resume " + options.save.string() + " to go on from it, or choose another folder");
  }
  require_can_save(*lock);
  return lock;
}

/// Saves when the options say so, and fills in what was saved.
class Checkpoints {
 public:
  Checkpoints(const TrainOptions& options, std::optional<CheckpointLock>& lock, Training& training, Report& report)
      : options_(options), lock_(lock), training_(training), report_(report), saved_step_(training.steps_done()) {}

  bool is_due() const { return options_.save_every && training_.steps_done() % *options_.save_every == 0; }
  void after_step() {
    if (is_due()) save();
  }
  void at_the_end() {
    if (lock_ && training_.steps_done() != saved_step_) save();
  }

 private:
  void save() {
    const Stopwatch watch;
    training_.save(*lock_);
    saved_step_ = training_.steps_done();
    report_.checkpoint = {
        .folder = options_.save.string(), .step = training_.steps_done(), .seconds = watch.elapsed_seconds()};
  }

  const TrainOptions& options_;
  std::optional<CheckpointLock>& lock_;
  Training& training_;
  Report& report_;
  std::int64_t saved_step_;  ///< the one that was resumed, until one is saved
};

/// The files that get a line a step. It waits for the step's gradient norm, so that nobody else has to: until the next
/// step is done, a checkpoint is to be saved, or the run ends or fails.
class StepLines {
 public:
  StepLines(const std::vector<std::filesystem::path>& paths, Training& training) : training_(training) {
    for (const auto& path : paths) files_.push_back(std::make_unique<MetricsFile>(path, training.steps_done()));
  }
  StepLines(const StepLines&) = delete;
  StepLines& operator=(const StepLines&) = delete;
  ~StepLines() {
    try {
      write_waiting();
    } catch (const std::exception&) {
      // The run has failed, and says why: that step's update, or a file.
    }
  }

  void add(const StepMetrics& step) {
    write_waiting();
    if (!files_.empty()) waiting_ = step;
  }
  void write_waiting() {
    if (std::optional<StepMetrics> step = std::exchange(waiting_, std::nullopt)) {
      step->gradient_norm = training_.gradient_norm_of(step->step);
      for (const auto& file : files_) file->write(*step);
    }
  }

 private:
  Training& training_;
  std::vector<std::unique_ptr<MetricsFile>> files_;
  std::optional<StepMetrics> waiting_;
};

/// Trains until the last step or an interrupt, saves, and fills in what the steps gave.
void run_steps(const TrainOptions& options, std::optional<CheckpointLock>& lock, Training& training,
               const std::vector<std::filesystem::path>& metrics_paths, const Interrupt& interrupt, Report& report) {
  const std::int64_t last_step = report.planned_steps;
  StepLines lines(metrics_paths, training);
  Checkpoints checkpoints(options, lock, training, report);
  Progress progress(last_step, training.usage());
  // The steps are done, whether or not their lines can be written.
  const auto write_or_save = [&](auto&& write) {
    try {
      write();
    } catch (const IoError&) {
      training.finish();
      checkpoints.at_the_end();
      throw;
    }
  };
  while (training.steps_done() < last_step && !interrupt.requested()) {
    const StepMetrics step = training.step();
    write_or_save([&] { lines.add(step); });
    progress.show(step);
    report.tokens += step.tokens;
    report.seconds += step.seconds;
    report.stall_seconds += step.stall_seconds;
    report.update_seconds += step.update_seconds;
    for (const StallCause cause : all_stall_causes) {
      report.stall_seconds_by_cause[index_of(cause)] += step.stall_seconds_by_cause[index_of(cause)];
    }
    for (const Link link : all_links) report.moved_in_steps[index_of(link)] += step.bytes_moved[index_of(link)];
    if (checkpoints.is_due())
      write_or_save([&] { lines.write_waiting(); });  // whoever resumes keeps the lines up to it
    checkpoints.after_step();
  }
  training.finish();
  write_or_save([&] { lines.write_waiting(); });
  checkpoints.at_the_end();
  report.steps = training.steps_done();
  report.loss = training.last_loss();
  report.skipped_steps = training.skipped_steps();
}

/// What the machine could still give each tier.
std::array<std::uint64_t, tier_count> spare_bytes(const Config& config, bool device_is_emulated) {
  std::array<std::uint64_t, tier_count> spare{};
  spare[index_of(Tier::host)] = available_memory_bytes();
  // What a GPU has beside the budget, its libraries may need.
  spare[index_of(Tier::device)] = device_is_emulated ? available_memory_bytes() : 0;
  std::optional<std::uint64_t> least;
  for (const auto& path : config.nvme.paths) {
    std::error_code error;
    const std::uint64_t free = std::filesystem::space(path, error).available;
    if (!error) least = std::min(least.value_or(free), free);
  }
  spare[index_of(Tier::nvme)] = least.value_or(0);
  return spare;
}

RunFacts facts_of(const Report& report, const Config& config) {
  return {.config = config,
          .seconds = report.seconds,
          .update_seconds = report.update_seconds,
          .stall_seconds_by_cause = report.stall_seconds_by_cause,
          .usage = report.usage,
          .spare_bytes = spare_bytes(config, report.device_is_emulated),
          .threads = report.threads,
          .cores = static_cast<int>(std::thread::hardware_concurrency())};
}

}  // namespace

bool train(const TrainOptions& options) {
  require_session_for_checkpoints(options);
  require_files_of_their_own(options);
  if (!options.resume.empty()) CheckpointReader(checkpoint_files(), options.resume);  // told before the work
  std::optional<CheckpointLock> lock = lock_for_saving(options);
  const Config config = with_timeline(options.config, options);
  std::vector<std::filesystem::path> metrics_paths;
  if (!options.metrics.empty()) metrics_paths.push_back(options.metrics);
  if (!options.output.empty()) {
    make_folder(options.output);
    metrics_paths.push_back(options.output / "metrics.jsonl");
  }
  for (const auto& path : metrics_paths) require_can_write("metrics", path);
  require_can_write("--timeline", options.timeline);

  const Interrupt interrupt;
  const auto stop = [&] { return interrupt.requested(); };
  const Dataset dataset(config.data.paths, config.model.sequence);
  const Stopwatch building;
  Training training(config, dataset, options.unmanaged);
  const double build_seconds = building.elapsed_seconds();
  TimelineFile timeline(options.timeline, training);
  if (!options.resume.empty()) training.resume(options.resume);
  announce(options, training, dataset);
  if (!options.output.empty()) {
    write_file(options.output / "config.toml", to_toml(resolved(config, training.usage())));
  }

  Report report;
  report.managed = !options.unmanaged;
  report.parameters = training.parameters();
  report.state_bytes = training.state_bytes();
  report.build_seconds = build_seconds;
  report.planned_steps = std::min(config.train.steps, options.stop_after.value_or(config.train.steps));
  report.threads = at::get_num_threads();
  report.resumed_after = training.steps_done();
  run_steps(options, lock, training, metrics_paths, interrupt, report);
  if (options.evaluate > 0 && !stop()) {
    const HeldOut held_out = training.evaluate(options.evaluate, stop);
    if (!stop()) report.held_out = held_out;
  }
  if (options.sample > 0 && !stop()) report.sample = training.sample(options.prompt, options.sample, stop);
  report.interrupted = stop();
  report.usage = training.usage();
  report.peak_resident_bytes = peak_resident_bytes();
  report.device_is_emulated = training.device().is_cpu();
  if (report.managed && report.tokens > 0) report.account = account_of(facts_of(report, config));
  std::fputs((options.json ? to_json(report) + "\n" : to_text(report, looks_of(stdout))).c_str(), stdout);
  std::fflush(stdout);
  if (!options.output.empty()) {
    if (report.sample) write_file(options.output / "sample.txt", *report.sample);
    write_file(options.output / "report.json", to_json(report) + "\n");
  }
  timeline.write();  // last: if it cannot be, nothing else is lost
  if (report.interrupted) {
    const std::string saved = report.checkpoint      ? "go on with --resume " + report.checkpoint->folder
                              : options.save.empty() ? "nothing was saved: with --save FOLDER a run can be resumed"
                                                     : "nothing was saved, as no step was made";
    std::fprintf(stderr, "terrace: interrupted after step %lld; %s\n", static_cast<long long>(report.steps),
                 saved.c_str());
  }
  return !report.interrupted;
}

}  // namespace terrace
