#include "tools/command.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fcntl.h>
#include <filesystem>
#include <string>
#include <unistd.h>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/config.h"
#include "base/error.h"
#include "base/log.h"
#include "base/nearest.h"
#include "base/units.h"
#include "tools/activation_bench.h"
#include "tools/adam_bench.h"
#include "tools/bench.h"
#include "tools/exit_code.h"
#include "tools/inspect.h"
#include "tools/link_bench.h"
#include "tools/nvme_bench.h"
#include "tools/train.h"
#include "tools/update_bench.h"
#include "tools/version.h"

namespace terrace {
namespace {

/// Whole numbers only; what CLI11 brings shows in the help, and names the largest double.
CLI::Validator at_least(std::int64_t least) {
  return CLI::Validator(
      [least](const std::string& text) {
        std::int64_t value = 0;
        const bool whole = CLI::detail::lexical_cast(text, value) && value >= least;
        return whole ? std::string() : "found " + text + "; accepted: a whole number from " + std::to_string(least);
      },
      "");
}

/// An unset variable of the shell gives an empty name, and must not give a run that saves nothing.
CLI::Validator folder_name() {
  return CLI::Validator(
      [](const std::string& text) { return text.empty() ? std::string("found nothing; accepted: a folder") : ""; }, "");
}

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
      ->type_name("FILE");
  command.add_option("--set", arguments.settings, "Set one key of the configuration, as in device.memory=64MiB")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
}

struct TrainArguments {
  ConfigArguments config;
  std::vector<std::string> data;
  TrainOptions options;
};

CLI::App* add_train(CLI::App& app, TrainArguments& arguments) {
  TrainOptions& options = arguments.options;
  CLI::App* train = app.add_subcommand("train", "Train a GPT on text, its memory spread over device, host and NVMe");
  add_config(*train, arguments.config);
  train->add_option("--data", arguments.data, "Text files or folders, instead of data.paths")->type_name("PATH");
  train->add_option("--metrics", options.metrics, "Write one JSON object a step")->type_name("FILE");
  train
      ->add_option("--timeline", options.timeline,
                   "Write what moved, waited and was used, for ui.perfetto.dev or chrome://tracing")
      ->type_name("FILE");
  train->add_option("--output", options.output, "Folder for config.toml, metrics.jsonl, sample.txt and report.json")
      ->type_name("FOLDER");
  train->add_flag("--unmanaged", options.unmanaged, "Train with plain LibTorch, all in memory: the same losses");
  train->add_option("--stop-after", options.stop_after, "End after so many steps of train.steps")
      ->type_name("STEPS")
      ->check(at_least(1));
  train->add_option("--save", options.save, "Save a checkpoint at the end, and at Ctrl-C after the step")
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
  return train;
}

ExitCode run_train(TrainArguments& arguments) {
  Config& config = arguments.options.config;
  config = arguments.config.load();
  if (!arguments.data.empty()) config.data.paths.assign(arguments.data.begin(), arguments.data.end());
  return train(arguments.options) ? ExitCode::done : ExitCode::interrupted;
}

constexpr const char* kBenchStepFooter =
    "Each figure is the median ratio of pairs of short rounds that take turns, with its 95% interval.\n"
    "Parameters rest on the host, in cases that end in -nvme on NVMe, in -mixed half on each; -x4 has four\n"
    "micro-batches a step. Gradients of all these rest on NVMe. \"by phases\" is the ratio to the sum over a step's\n"
    "phases of the largest term of each: nothing of an update begins before step().\n"
    "Examples, with a folder on the drive that is to be used:\n"
    "  terrace bench step --nvme /data/terrace                      (all cases: some hours)\n"
    "  terrace bench step --nvme /data/terrace --case balanced --case link-bound --json\n"
    "  terrace bench step --case real-resident --pairs 3            (a first look)\n"
    "\nExit codes: 0 done, whatever the verdicts, 1 internal error, 2 bad usage, 3 too little memory,\n"
    "4 I/O failed, 5 data corrupt, 130 interrupted (after printing what was measured).";

CLI::App* add_bench(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Measure against what the hardware allows");
  bench->require_subcommand(1);
  bench->footer("Example:\n  terrace bench step --help");
  return bench;
}

struct BenchLinkArguments {
  std::vector<std::string> settings;
  BenchLinkOptions options;
};

CLI::App* add_bench_link(CLI::App& bench, BenchLinkArguments& arguments) {
  CLI::App* link = bench.add_subcommand("link", "Time copies between host and device, each way and both at once");
  link->add_option("--set", arguments.settings, "Set one key of the configuration, as in device.kind=cuda")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  link->add_flag("--json", arguments.options.json, "Report as JSON");
  link->footer("Example:\n  terrace bench link --set device.kind=cuda");
  return link;
}

void run_bench_link(BenchLinkArguments& arguments) {
  const Config config = Config::parse("", "configuration", arguments.settings);
  set_log_level(config.log.level);
  arguments.options.device = config.device;
  bench_link(arguments.options);
}

struct BenchNvmeArguments {
  std::vector<std::string> blocks;
  std::string bytes;
  BenchNvmeOptions options;
};

CLI::App* add_bench_nvme(CLI::App& bench, BenchNvmeArguments& arguments) {
  CLI::App* nvme = bench.add_subcommand("nvme", "Time the transfer service's reads and writes against a bare loop's");
  nvme->add_option("--path", arguments.options.folder, "Folder on the drive to measure")
      ->type_name("FOLDER")
      ->required();
  nvme->add_option("--block", arguments.blocks,
                   "A size of block; may be given several times. 64KiB, 256KiB and 1MiB, "
                   "unless given")
      ->type_name("SIZE")
      ->allow_extra_args(false);
  nvme->add_option("--depth", arguments.options.depths,
                   "Blocks with the drive at once, each way; may be given several "
                   "times. 8 and 32, unless given")
      ->type_name("COUNT")
      ->allow_extra_args(false)
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1024}));
  nvme->add_option("--bytes", arguments.bytes, "Moved in a sample, each way; 256MiB, unless given")->type_name("SIZE");
  nvme->add_option("--rounds", arguments.options.rounds, "Rounds of four samples of each side")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(at_least(1));
  nvme->add_flag("--busy", arguments.options.busy, "Keep every core busy meanwhile");
  nvme->add_flag("--json", arguments.options.json, "Report as JSON");
  nvme->footer("Example:\n  terrace bench nvme --path /data/terrace --block 1MiB --depth 8");
  return nvme;
}

void run_bench_nvme(BenchNvmeArguments& arguments) {
  BenchNvmeOptions& options = arguments.options;
  if (!arguments.blocks.empty()) options.blocks.clear();
  for (const std::string& block : arguments.blocks) {
    options.blocks.push_back(parse_bytes(block));
    if (options.blocks.back() == 0 || options.blocks.back() % 4096 != 0 || options.blocks.back() > (1U << 30U)) {
      throw ConfigError("--block " + block + " is no multiple of 4KiB up to 1GiB");
    }
  }
  if (!arguments.bytes.empty()) options.bytes = parse_bytes(arguments.bytes);
  if (options.bytes < *std::max_element(options.blocks.begin(), options.blocks.end())) {
    throw ConfigError("--bytes " + arguments.bytes + " is less than a block");
  }
  bench_nvme(options);
}

struct BenchAdamArguments {
  std::vector<std::string> parameters;
  BenchAdamOptions options;
};

CLI::App* add_bench_adam(CLI::App& bench, BenchAdamArguments& arguments) {
  CLI::App* adam = bench.add_subcommand("adam", "Time the optimizer's update against the memory traffic it needs");
  adam->add_option("--parameters", arguments.parameters,
                   "How many are updated, as in 48Mi; may be given several times. 64Ki to 256Mi, unless given")
      ->type_name("COUNT")
      ->allow_extra_args(false);
  adam->add_option("--rounds", arguments.options.rounds, "Rounds of each side, which take turns")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(at_least(1));
  adam->add_flag("--json", arguments.options.json, "Report as JSON");
  adam->footer("Example:\n  terrace bench adam --parameters 48Mi");
  return adam;
}

void run_bench_adam(BenchAdamArguments& arguments) {
  BenchAdamOptions& options = arguments.options;
  if (!arguments.parameters.empty()) options.parameters.clear();
  for (const std::string& count : arguments.parameters) {
    // A number with the prefixes of sizes: 48Mi.
    std::uint64_t parameters = 0;
    try {
      parameters = parse_bytes(count + "B");
    } catch (const ConfigError&) {
    }
    if (parameters == 0 || parameters > (std::uint64_t{1} << 40U)) {
      throw ConfigError("--parameters " + count + " is no number such as 1000000 or 48Mi");
    }
    options.parameters.push_back(parameters);
  }
  bench_adam(options);
}

CLI::App* add_bench_step(CLI::App& bench, BenchStepOptions& options) {
  CLI::App* step = bench.add_subcommand("step", "Time training steps against the floors under them and plain LibTorch");
  std::string names;
  for (const std::string& name : bench_step_cases()) names += (names.empty() ? "" : ", ") + name;
  step->add_option("--case", options.cases, "A case to run; may be given several times. All, unless given: " + names)
      ->type_name("NAME")
      ->allow_extra_args(false);
  step->add_option("--pairs", options.pairs, "Pairs of rounds; from 30 on doubled while the verdict is open, up to 120")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(at_least(1));
  step->add_option("--nvme", options.nvme, "Folder for what rests on NVMe")->type_name("FOLDER");
  step->add_flag("--json", options.json, "Report as JSON");
  step->footer(kBenchStepFooter);
  return step;
}

constexpr const char* kBenchUpdateFooter =
    "Of a model whose optimizer states rest on NVMe: the update alone against the larger of the times that the drive\n"
    "and memory take for the same bytes, and how much of it is hidden behind computation that is only waited for.\n"
    "Each figure is the median of pairs that take turns, with its 95% interval.\n"
    "Examples:\n"
    "  terrace bench update --path /data/terrace                            (a quarter of an hour)\n"
    "  terrace bench update --path /data/terrace --pairs 5 --case fp32-float32 --json   (a first look)\n"
    "\nExit codes: 0 done, whatever the verdicts, 1 internal error, 2 bad usage, 3 too little memory,\n"
    "4 I/O failed, 5 data corrupt, 130 interrupted (after printing what was measured).";

CLI::App* add_bench_update(CLI::App& bench, BenchUpdateOptions& options) {
  CLI::App* update = bench.add_subcommand("update", "Time updates of a model whose optimizer states rest on NVMe");
  update->add_option("--path", options.folder, "Folder on the drive that is to hold the states")
      ->type_name("FOLDER")
      ->required()
      ->check(folder_name());
  std::string names;
  for (const std::string& name : bench_update_cases()) names += (names.empty() ? "" : ", ") + name;
  update
      ->add_option("--case", options.cases,
                   "Parameters and states; may be given several times. All, unless given: " + names)
      ->type_name("NAME")
      ->allow_extra_args(false);
  update->add_option("--layers", options.layers, "Of the model, each of 3.2M parameters")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(at_least(bench_update_fewest_layers));
  update
      ->add_option("--pairs", options.pairs, "Pairs of samples; from 30 on doubled while a verdict is open, up to 120")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(at_least(1));
  update->add_flag("--json", options.json, "Report as JSON");
  update->footer(kBenchUpdateFooter);
  return update;
}

constexpr const char* kBenchActivationsFooter =
    "Of blocks whose computation is only waited for: what becomes of their activations by placement.activations, on\n"
    "three links, in a case whose optimum is mixed, and where transfers can hide; and of a GPT that computes.\n"
    "Blocks in letters: k keeps what it saves on the device, o has it leave, r runs again in backward.\n"
    "Examples:\n"
    "  terrace bench activations --path /data/terrace                       (half an hour)\n"
    "  terrace bench activations --path /data/terrace --case mixed --rounds 5 --json   (a first look)\n"
    "\nExit codes: 0 done, whatever the verdicts, 1 internal error, 2 bad usage, 3 too little memory,\n"
    "4 I/O failed, 5 data corrupt, 130 interrupted (after printing what was measured).";

CLI::App* add_bench_activations(CLI::App& bench, BenchActivationsOptions& options) {
  CLI::App* activations =
      bench.add_subcommand("activations", "Time steps whose activations are kept, moved and recomputed");
  activations->add_option("--path", options.folder, "Folder on the drive that activations may go to")
      ->type_name("FOLDER")
      ->required()
      ->check(folder_name());
  std::string names;
  for (const std::string& name : bench_activations_cases()) names += (names.empty() ? "" : ", ") + name;
  activations
      ->add_option("--case", options.cases, "A case to run; may be given several times. All, unless given: " + names)
      ->type_name("NAME")
      ->allow_extra_args(false);
  activations
      ->add_option("--rounds", options.rounds,
                   "Rounds of all ways in turn; from 30 on doubled while a verdict is open, up to 120")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(at_least(1));
  activations->add_flag("--json", options.json, "Report as JSON");
  activations->footer(kBenchActivationsFooter);
  return activations;
}

constexpr const char* kInspectFooter =
    "Tells the tiers that a run would make and what works otherwise than it should, without making them: beside a run\n"
    "that trains, too. Rates that --probe measured are kept and shown again, with their date.\n"
    "Examples:\n"
    "  terrace inspect --config long.toml\n"
    "  terrace inspect --set nvme.paths=/data/terrace --probe --json\n"
    "\nExit codes: 0 done, 1 internal error, 2 bad usage or configuration, 3 a budget is too small, 4 I/O failed,\n"
    "130 interrupted.";

struct InspectArguments {
  ConfigArguments config;
  InspectOptions options;
};

CLI::App* add_inspect(CLI::App& app, InspectArguments& arguments) {
  CLI::App* inspect = app.add_subcommand("inspect", "Show what a run would use on this machine, and why");
  add_config(*inspect, arguments.config);
  inspect->add_flag("--probe", arguments.options.probe, "Measure the rates of memory, link and drives: seconds each");
  inspect->add_flag("--json", arguments.options.json, "Report as JSON");
  inspect->footer(kInspectFooter);
  return inspect;
}

ExitCode run_inspect(InspectArguments& arguments) {
  arguments.options.config = arguments.config.load();
  return inspect(arguments.options) ? ExitCode::done : ExitCode::interrupted;
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
  TrainArguments arguments;
  const CLI::App* train = add_train(app, arguments);
  BenchStepOptions bench_options;
  CLI::App* bench = add_bench(app);
  const CLI::App* step = add_bench_step(*bench, bench_options);
  BenchLinkArguments link_arguments;
  const CLI::App* link = add_bench_link(*bench, link_arguments);
  BenchNvmeArguments nvme_arguments;
  const CLI::App* nvme = add_bench_nvme(*bench, nvme_arguments);
  BenchAdamArguments adam_arguments;
  const CLI::App* adam = add_bench_adam(*bench, adam_arguments);
  BenchUpdateOptions update_options;
  const CLI::App* update = add_bench_update(*bench, update_options);
  BenchActivationsOptions activations_options;
  const CLI::App* activations = add_bench_activations(*bench, activations_options);
  InspectArguments inspect_arguments;
  const CLI::App* inspect = add_inspect(app, inspect_arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    app.exit(help);
    return ExitCode::done;
  } catch (const CLI::ParseError& error) {
    if (app.get_subcommands().empty()) refuse_unknown_command(app, "terrace --help");
    if (bench->parsed() && bench->get_subcommands().empty()) refuse_unknown_command(*bench, "terrace bench --help");
    throw ConfigError(error.what(), train->parsed()         ? "see terrace train --help"
                                    : inspect->parsed()     ? "see terrace inspect --help"
                                    : link->parsed()        ? "see terrace bench link --help"
                                    : nvme->parsed()        ? "see terrace bench nvme --help"
                                    : adam->parsed()        ? "see terrace bench adam --help"
                                    : update->parsed()      ? "see terrace bench update --help"
                                    : activations->parsed() ? "see terrace bench activations --help"
                                    : bench->parsed()       ? "see terrace bench step --help"
                                                            : "see terrace --help");
  }
  if (inspect->parsed()) return run_inspect(inspect_arguments);
  if (link->parsed()) {
    run_bench_link(link_arguments);
    return ExitCode::done;
  }
  if (nvme->parsed()) {
    run_bench_nvme(nvme_arguments);
    return ExitCode::done;
  }
  if (adam->parsed()) {
    run_bench_adam(adam_arguments);
    return ExitCode::done;
  }
  if (update->parsed()) return bench_update(update_options) ? ExitCode::done : ExitCode::interrupted;
  if (activations->parsed()) return bench_activations(activations_options) ? ExitCode::done : ExitCode::interrupted;
  if (step->parsed()) return bench_step(bench_options) ? ExitCode::done : ExitCode::interrupted;
  return run_train(arguments);
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
