#include "tools/bench_commands.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "base/config.h"
#include "base/error.h"
#include "base/log.h"
#include "base/units.h"
#include "tools/activation_bench.h"
#include "tools/adam_bench.h"
#include "tools/bench.h"
#include "tools/link_bench.h"
#include "tools/nvme_bench.h"
#include "tools/update_bench.h"

namespace terrace {
namespace {

/// The options of all that have named cases. `pairs` is how --pairs is called and explained.
void add_case_options(CLI::App& command, CaseOptions& options, const std::vector<std::string>& cases,
                      const std::string& case_help, const std::string& pairs, const std::string& pairs_help) {
  std::string names;
  for (const std::string& name : cases) names += (names.empty() ? "" : ", ") + name;
  command.add_option("--case", options.cases, case_help + "; may be given several times. All, unless given: " + names)
      ->type_name("NAME")
      ->allow_extra_args(false);
  command.add_option(pairs, options.pairs, pairs_help)->type_name("COUNT")->capture_default_str()->check(at_least(1));
  command.add_flag("--json", options.json, "Report as JSON");
}

ExitCode code_of(bool is_complete) { return is_complete ? ExitCode::done : ExitCode::interrupted; }

Subcommand add_link(CLI::App& bench) {
  struct Arguments {
    std::vector<std::string> settings;
    BenchLinkOptions options;
  };
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* link = bench.add_subcommand("link", "Time copies between host and device, each way and both at once");
  link->add_option("--set", arguments->settings, "Set one key of the configuration, as in device.kind=cuda")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  link->add_flag("--json", arguments->options.json, "Report as JSON");
  link->footer("Example:\n  terrace bench link --set device.kind=cuda");
  return {link, [arguments] {
            const Config config = Config::parse("", "configuration", arguments->settings);
            set_log_level(config.log.level);
            arguments->options.device = config.device;
            return code_of(bench_link(arguments->options));
          }};
}

struct NvmeArguments {
  std::vector<std::string> blocks;
  std::string bytes;
  BenchNvmeOptions options;
};

bool run_nvme(NvmeArguments& arguments) {
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
  return bench_nvme(options);
}

Subcommand add_nvme(CLI::App& bench) {
  const auto arguments = std::make_shared<NvmeArguments>();
  CLI::App* nvme = bench.add_subcommand("nvme", "Time the transfer service's reads and writes against a bare loop's");
  nvme->add_option("--path", arguments->options.folder, "Folder on the drive to measure")
      ->type_name("FOLDER")
      ->required();
  nvme->add_option("--block", arguments->blocks,
                   "A size of block; may be given several times. 64KiB, 256KiB and 1MiB, "
                   "unless given")
      ->type_name("SIZE")
      ->allow_extra_args(false);
  nvme->add_option("--depth", arguments->options.depths,
                   "Blocks with the drive at once, each way; may be given several "
                   "times. 8 and 32, unless given")
      ->type_name("COUNT")
      ->allow_extra_args(false)
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1024}));
  nvme->add_option("--bytes", arguments->bytes, "Moved in a sample, each way; 256MiB, unless given")->type_name("SIZE");
  nvme->add_option("--rounds", arguments->options.rounds, "Rounds of four samples of each side")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(at_least(1));
  nvme->add_flag("--busy", arguments->options.busy, "Keep every core busy meanwhile");
  nvme->add_flag("--json", arguments->options.json, "Report as JSON");
  nvme->footer("Example:\n  terrace bench nvme --path /data/terrace --block 1MiB --depth 8");
  return {nvme, [arguments] { return code_of(run_nvme(*arguments)); }};
}

struct AdamArguments {
  std::vector<std::string> parameters;
  BenchAdamOptions options;
};

bool run_adam(AdamArguments& arguments) {
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
  return bench_adam(options);
}

Subcommand add_adam(CLI::App& bench) {
  const auto arguments = std::make_shared<AdamArguments>();
  CLI::App* adam = bench.add_subcommand("adam", "Time the optimizer's update against the memory traffic it needs");
  adam->add_option("--parameters", arguments->parameters,
                   "How many are updated, as in 48Mi; may be given several times. 64Ki to 256Mi, unless given")
      ->type_name("COUNT")
      ->allow_extra_args(false);
  adam->add_option("--rounds", arguments->options.rounds, "Rounds of each side, which take turns")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(at_least(1));
  adam->add_flag("--json", arguments->options.json, "Report as JSON");
  adam->footer("Example:\n  terrace bench adam --parameters 48Mi");
  return {adam, [arguments] { return code_of(run_adam(*arguments)); }};
}

constexpr const char* kStepFooter =
    "Each figure is the median ratio of pairs of short rounds that take turns, with its 95% interval.\n"
    "Parameters rest on the host, in cases that end in -nvme on NVMe, in -mixed half on each; -x4 has four\n"
    "micro-batches a step, and -clipped clips gradients by their norm. Gradients of all these rest on NVMe. \"by\n"
    "phases\" is the ratio to the sum over a step's phases of the largest term of each: nothing of an update begins\n"
    "before step(). In real-resident and real-nvme a GPT computes, and in waited-nvme as much time is only waited\n"
    "for: what is kept of the speed of plain LibTorch.\n"
    "Examples, with a folder on the drive that is to be used:\n"
    "  terrace bench step --nvme /data/terrace                      (all cases: some hours)\n"
    "  terrace bench step --nvme /data/terrace --case balanced --case link-bound --json\n"
    "  terrace bench step --case real-resident --pairs 3            (a first look)\n"
    "\nExit codes: 0 done, whatever the verdicts, 1 internal error, 2 bad usage, 3 too little memory,\n"
    "4 I/O failed, 5 data corrupt, 130 interrupted (after printing what was measured).";

Subcommand add_step(CLI::App& bench) {
  const auto options = std::make_shared<BenchStepOptions>();
  CLI::App* step = bench.add_subcommand("step", "Time training steps against the floors under them and plain LibTorch");
  add_case_options(*step, *options, bench_step_cases(), "A case to run", "--pairs",
                   "Pairs of rounds; from 30 on doubled while the verdict is open, up to 120");
  step->add_option("--nvme", options->nvme, "Folder for what rests on NVMe")->type_name("FOLDER");
  step->footer(kStepFooter);
  return {step, [options] { return code_of(bench_step(*options)); }};
}

constexpr const char* kUpdateFooter =
    "Of a model whose optimizer states rest on NVMe: the update alone against the larger of the times that the drive\n"
    "and memory take for the same bytes, and how much of it is hidden behind computation that is only waited for.\n"
    "Each figure is the median of pairs that take turns, with its 95% interval.\n"
    "Examples:\n"
    "  terrace bench update --path /data/terrace                            (a quarter of an hour)\n"
    "  terrace bench update --path /data/terrace --pairs 5 --case fp32-float32 --json   (a first look)\n"
    "\nExit codes: 0 done, whatever the verdicts, 1 internal error, 2 bad usage, 3 too little memory,\n"
    "4 I/O failed, 5 data corrupt, 130 interrupted (after printing what was measured).";

Subcommand add_update(CLI::App& bench) {
  const auto options = std::make_shared<BenchUpdateOptions>();
  CLI::App* update = bench.add_subcommand("update", "Time updates of a model whose optimizer states rest on NVMe");
  update->add_option("--path", options->folder, "Folder on the drive that is to hold the states")
      ->type_name("FOLDER")
      ->required()
      ->check(folder_name());
  add_case_options(*update, *options, bench_update_cases(), "Parameters and states", "--pairs",
                   "Pairs of samples; from 30 on doubled while a verdict is open, up to 120");
  update->add_option("--layers", options->layers, "Of the model, each of 3.2M parameters")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(at_least(bench_update_fewest_layers));
  update->footer(kUpdateFooter);
  return {update, [options] { return code_of(bench_update(*options)); }};
}

constexpr const char* kActivationsFooter =
    "Of blocks whose computation is only waited for: what becomes of their activations by placement.activations, on\n"
    "three links, in a case whose optimum is mixed, and where transfers can hide; and of a GPT that computes.\n"
    "Blocks in letters: k keeps what it saves on the device, o has it leave, r runs again in backward.\n"
    "Examples:\n"
    "  terrace bench activations --path /data/terrace                       (half an hour)\n"
    "  terrace bench activations --path /data/terrace --case mixed --rounds 5 --json   (a first look)\n"
    "\nExit codes: 0 done, whatever the verdicts, 1 internal error, 2 bad usage, 3 too little memory,\n"
    "4 I/O failed, 5 data corrupt, 130 interrupted (after printing what was measured).";

Subcommand add_activations(CLI::App& bench) {
  const auto options = std::make_shared<BenchActivationsOptions>();
  CLI::App* activations =
      bench.add_subcommand("activations", "Time steps whose activations are kept, moved and recomputed");
  activations->add_option("--path", options->folder, "Folder on the drive that activations may go to")
      ->type_name("FOLDER")
      ->required()
      ->check(folder_name());
  add_case_options(*activations, *options, bench_activations_cases(), "A case to run", "--rounds",
                   "Rounds of all ways in turn; from 30 on doubled while a verdict is open, up to 120");
  activations->footer(kActivationsFooter);
  return {activations, [options] { return code_of(bench_activations(*options)); }};
}

}  // namespace

std::vector<Subcommand> add_bench_commands(CLI::App& bench) {
  return {add_step(bench), add_link(bench),   add_nvme(bench),
          add_adam(bench), add_update(bench), add_activations(bench)};
}

}  // namespace terrace
