#include "tools/command.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <fcntl.h>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/config.h"
#include "base/error.h"
#include "base/log.h"
#include "base/nearest.h"
#include "tools/bench_commands.h"
#include "tools/exit_code.h"
#include "tools/inspect.h"
#include "tools/subcommand.h"
#include "tools/train.h"
#include "tools/version.h"

namespace terrace {
namespace {

constexpr const char* kTrainFooter =
    "Example: a small model on any text, with 96 MiB on the device and the rest on the host:\n"
    "  terrace train --data ~/notes --set device.memory=96MiB --set train.steps=200 --evaluate 16\n"
    "The same without Terrace, to compare loss and speed: add --unmanaged.\n"
    "A long run, with a checkpoint every 500 steps and at Ctrl-C; and the same again, to go on from the last:\n"
    "  terrace train --config long.toml --save run1 --save-every 500\n"
    "  terrace train --config long.toml --save run1 --save-every 500 --resume run1\n"
    "\nExit codes: 0 done, 1 internal error, 2 bad usage, configuration or data, 3 a budget is too small,\n"
    "4 I/O failed, 5 data corrupt, 130 interrupted.";

/// Where a configuration comes from.
struct ConfigArguments {
  std::string config;
  std::vector<std::string> settings;

  Config load() const {
    Config loaded = config.empty() ? Config::parse("", "configuration", settings) : Config::load(config, settings);
    set_log_level(loaded.log.level);
    return loaded;
  }
};

void add_config(CLI::App& command, ConfigArguments& arguments) {
  command.add_option("--config", arguments.config, "Configuration file (TOML); every key has a default")
      ->type_name("FILE")
      ->check(file_name());
  command.add_option("--set", arguments.settings, "Set one key of the configuration, as in device.memory=64MiB")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
}

struct TrainArguments {
  ConfigArguments config;
  std::vector<std::string> data;
  TrainOptions options;
};

ExitCode run_train(TrainArguments& arguments) {
  Config& config = arguments.options.config;
  config = arguments.config.load();
  arguments.options.config_file = arguments.config.config;
  if (!arguments.data.empty()) config.data.paths.assign(arguments.data.begin(), arguments.data.end());
  return train(arguments.options) ? ExitCode::done : ExitCode::interrupted;
}

Subcommand add_train(CLI::App& app) {
  const auto arguments = std::make_shared<TrainArguments>();
  TrainOptions& options = arguments->options;
  CLI::App* train = app.add_subcommand("train", "Train a GPT on text, its memory spread over device, host and NVMe");
  add_config(*train, arguments->config);
  train->add_option("--data", arguments->data, "Text files or folders, instead of data.paths")->type_name("PATH");
  train->add_option("--metrics", options.metrics, "Write one JSON object a step, once the next is done")
      ->type_name("FILE")
      ->check(file_name());
  train
      ->add_option("--timeline", options.timeline,
                   "Write what moved, waited and was used, for ui.perfetto.dev or chrome://tracing")
      ->type_name("FILE")
      ->check(file_name());
  train->add_option("--output", options.output, "Folder for config.toml, metrics.jsonl, sample.txt and report.json")
      ->type_name("FOLDER")
      ->check(folder_name());
  train->add_flag("--unmanaged", options.unmanaged, "Train with plain LibTorch, all in memory: the same losses");
  train->add_option("--stop-after", options.stop_after, "End after so many steps of train.steps")
      ->type_name("STEPS")
      ->check(at_least(1));
  train->add_option("--save", options.save, "Save a checkpoint at the end, and at Ctrl-C or SIGTERM after the step")
      ->type_name("FOLDER")
      ->check(folder_name());
  train->add_option("--save-every", options.save_every, "Save after every so many steps too")
      ->type_name("STEPS")
      ->check(at_least(1));
  train->add_option("--resume", options.resume, "Go on from the step of a checkpoint")
      ->type_name("FOLDER")
      ->check(folder_name());
  train->add_option("--evaluate", options.evaluate, "Held-out batches to measure after training")
      ->type_name("BATCHES")
      ->check(at_least(0));
  train->add_option("--sample", options.sample, "Bytes to generate after training")
      ->type_name("BYTES")
      ->check(at_least(0));
  train->add_option("--prompt", options.prompt, "What the sample continues")->type_name("TEXT");
  train->add_flag("--json", options.json, "Report as JSON");
  train->footer(kTrainFooter);
  return {train, [arguments] { return run_train(*arguments); }};
}

constexpr const char* kInspectFooter =
    "Tells the tiers that a run would make and what works otherwise than it should, without making them: beside a run\n"
    "that trains, too. Rates that --probe measured are kept and shown again, with their date.\n"
    "Examples:\n"
    "  terrace inspect --config long.toml\n"
    "  terrace inspect --set nvme.paths=/data/terrace --probe --json\n"
    "\nExit codes: 0 done, 1 internal error, 2 bad usage or configuration, 3 a budget is too small, 4 I/O failed,\n"
    "130 interrupted.";

Subcommand add_inspect(CLI::App& app) {
  struct Arguments {
    ConfigArguments config;
    InspectOptions options;
  };
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("inspect", "Show what a run would use on this machine, and why");
  add_config(*command, arguments->config);
  command->add_flag("--probe", arguments->options.probe, "Measure the rates of memory, link and drives: seconds each");
  command->add_flag("--json", arguments->options.json, "Report as JSON");
  command->footer(kInspectFooter);
  return {command, [arguments] {
            arguments->options.config = arguments->config.load();
            return inspect(arguments->options) ? ExitCode::done : ExitCode::interrupted;
          }};
}

/// Where a command is wanted and another word was given: throws ConfigError with the one that was meant.
void refuse_unknown_command(const CLI::App& app, const std::string& help) {
  const std::vector<std::string> given = app.remaining();
  if (given.empty() || given.front().starts_with('-')) return;
  std::vector<std::string> known;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    known.push_back(command->get_name());
  }
  throw ConfigError("there is no command '" + given.front() + "'",
                    "did you mean '" + nearest_name(given.front(), known) + "'? see " + help);
}

ExitCode run(int argc, char** argv) {
  CLI::App app("Terrace trains models larger than the device's memory", "terrace");
  app.set_version_flag("--version", std::string("terrace ") + version);
  app.require_subcommand(1);
  app.footer("Example:\n  terrace train --help");
  std::vector<Subcommand> commands{add_train(app), add_inspect(app)};
  CLI::App& bench = *app.add_subcommand("bench", "Measure against what the hardware allows");
  bench.require_subcommand(1);
  bench.footer("Example:\n  terrace bench step --help");
  for (Subcommand& command : add_bench_commands(bench)) commands.push_back(std::move(command));
  const auto is_given = [](const Subcommand& command) { return command.app->parsed(); };
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    app.exit(help);
    return ExitCode::done;
  } catch (const CLI::ParseError& error) {
    if (app.get_subcommands().empty()) refuse_unknown_command(app, "terrace --help");
    if (bench.parsed() && bench.get_subcommands().empty()) refuse_unknown_command(bench, "terrace bench --help");
    std::string help = "see terrace ";
    for (const CLI::App* given = &app; !given->get_subcommands().empty();) {
      given = given->get_subcommands().front();
      help += given->get_name() + " ";
    }
    throw ConfigError(error.what(), help + "--help");
  }
  return std::find_if(commands.begin(), commands.end(), is_given)->run();
}

/// Where one is closed, the next file that is opened would take its place, and get what is printed.
void fill_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) < 0 && errno == EBADF) ::open("/dev/null", O_RDWR);  // takes the lowest free one
  }
}

/// What was printed has arrived.
void require_output() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  throw IoError("not all of the report could be written to the standard output",
                "give it a file on a disk that has room, or a program that reads to the end");
}

}  // namespace

int run_command(int argc, char** argv) noexcept {
  try {
    fill_standard_descriptors();
    std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error with a name, not the end
    std::signal(SIGPIPE, SIG_IGN);  // nor do training and its checkpoint end with who reads the progress
    const ExitCode code = run(argc, argv);
    require_output();
    return static_cast<int>(code);
  } catch (...) {
    const Failure failure = failure_of(std::current_exception());
    std::fprintf(stderr, "terrace: %s\n", failure.message.c_str());
    return static_cast<int>(failure.code);
  }
}

}  // namespace terrace
