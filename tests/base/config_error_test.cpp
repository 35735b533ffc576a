// What a configuration refuses and what it says: the file, the line, the key, what was found and what is accepted.
#include <fstream>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/config.h"
#include "base/error.h"
#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

template <typename Act>
std::string error_of(Act act) {
  try {
    act();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

std::string parse_error(std::string_view text) {
  return error_of([&] { Config::parse(text, "t.toml"); });
}

std::string set_error(std::string_view assignment) {
  return error_of([&] { Config().set(assignment); });
}

TEST(Config, unknown_key_names_the_line_and_the_nearest_key) {
  EXPECT_EQ(parse_error("[host]\nmemory = '1MiB'\n[device]\nmemroy = '1MiB'\n"),
            "t.toml:4: unknown key \"device.memroy\"\n  hint: did you mean \"device.memory\"?");
  EXPECT_EQ(parse_error("[train]\nlayers = 4\n"),
            "t.toml:2: unknown key \"train.layers\"\n  hint: did you mean \"model.layers\"?");
  EXPECT_EQ(parse_error("\nsteps = 4"), "t.toml:2: unknown key \"steps\"\n  hint: did you mean \"train.steps\"?");
}

TEST(Config, unknown_table_names_the_line_and_the_nearest_table) {
  EXPECT_EQ(parse_error("\n[devise]\nmemory = '1MiB'\n"),
            "t.toml:2: unknown table [devise]\n  hint: did you mean [device]?");
}

TEST(Config, unknown_tier_names_the_line_and_the_nearest_tier) {
  EXPECT_EQ(parse_error("[placement]\nparameters = { hots = 1 }"),
            "t.toml:2: placement.parameters: unknown tier \"hots\"; accepted: device, host, nvme\n"
            "  hint: did you mean \"host\"?");
}

TEST(Config, a_value_in_place_of_a_table_is_refused) {
  EXPECT_EQ(parse_error("device = 5"), "t.toml:1: device: found 5; accepted: a table: [device], then its keys");
  EXPECT_NE(parse_error("[[device]]\nkind = 'auto'").find("accepted: a table: [device]"), std::string::npos);
}

TEST(Config, a_table_in_place_of_a_value_is_refused) {
  EXPECT_EQ(parse_error("[device.memory]\nx = 1").find("t.toml:1: device.memory: found a table; accepted: "), 0U);
  EXPECT_EQ(parse_error("[[train.steps]]\nx = 1").find("t.toml:1: train.steps: found a list of tables; accepted"), 0U);
  EXPECT_EQ(parse_error("host.memory = {a = 1}").find("t.toml:1: host.memory: found { a = 1 }; accepted: "), 0U);
}

TEST(Config, a_wrong_type_names_the_line_the_key_what_was_found_and_what_is_accepted) {
  EXPECT_EQ(parse_error("[device]\nmemory = 5"),
            "t.toml:2: device.memory: found 5; accepted: a size above zero, such as \"512MiB\", or \"auto\"\n"
            "  hint: a size is a string with a unit: \"5B\"");
  for (const std::string none : {"nan", "-inf", "-1"}) {
    EXPECT_EQ(parse_error("device.memory = " + none).find("hint"), std::string::npos) << none;
  }
  EXPECT_EQ(parse_error("model.layers = \"4\""),
            "t.toml:1: model.layers: found \"4\"; accepted: a whole number from 1 to 2147483647");
  EXPECT_EQ(parse_error("train.steps = 1.5").find("t.toml:1: train.steps: found 1.5; accepted: a whole number"), 0U);
  EXPECT_EQ(parse_error("train.learning_rate = true"),
            "t.toml:1: train.learning_rate: found true; accepted: a number from 0 to 1e+37");
  EXPECT_EQ(parse_error("device.kind = 1"),
            "t.toml:1: device.kind: found 1; accepted: \"auto\", \"cuda\", \"emulated\"");
  EXPECT_EQ(parse_error("placement.gradients = 0.5").find("t.toml:1: placement.gradients: found 0.5; accepted: "), 0U);
}

TEST(Config, a_bad_rate_of_a_link_says_why_and_what_is_accepted) {
  const std::string accepted = "accepted: a rate above zero, such as \"1GB/s\", or \"unlimited\"";
  EXPECT_EQ(parse_error("device.link = 5"), "t.toml:1: device.link: found 5; " + accepted);
  EXPECT_EQ(parse_error("device.link = '1GB'"), "t.toml:1: device.link: found \"1GB\"; " + accepted);
  EXPECT_EQ(parse_error("device.link = '0GB/s'"), "t.toml:1: device.link: found \"0GB/s\"; " + accepted);
  EXPECT_NE(parse_error("device.link = 'fast/s'").find(accepted), std::string::npos);
}

TEST(Config, a_path_that_is_none_names_its_own_line) {
  EXPECT_EQ(parse_error("[nvme]\npaths = [\n  \"/a\",\n  5,\n]").find("t.toml:4: nvme.paths: found 5; accepted: "), 0U);
  EXPECT_NE(parse_error(R"(nvme.paths = "a\u0000b")").find("accepted: a path, in which no byte is 0"),
            std::string::npos);
  EXPECT_EQ(parse_error("data.paths = [\"\"]").find("t.toml:1: data.paths: found \"\"; accepted: "), 0U);
}

TEST(Config, a_block_is_whole_units) {
  EXPECT_EQ(Config::parse("io.block = '12KiB'").io.block, 12U << 10);
  EXPECT_EQ(parse_error("io.block = '6000B'"),
            "t.toml:1: io.block: found \"6000B\"; accepted: a multiple of \"4KiB\" up to \"256MiB\", or \"auto\"");
  for (const char* const block : {"'0B'", "'512MiB'"}) {
    EXPECT_NE(parse_error("io.block = " + std::string(block)).find("accepted: a multiple of"), std::string::npos)
        << block;
  }
}

TEST(Config, a_timeline_holds_something_or_nothing) {
  EXPECT_EQ(Config::parse("timeline.memory = '0B'").timeline.memory, 0U);
  EXPECT_EQ(Config::parse("timeline.memory = '16KiB'").timeline.memory, 16U << 10);
  EXPECT_EQ(Config::parse("timeline.memory = 'auto'").timeline.memory, std::nullopt);
  EXPECT_EQ(parse_error("timeline.memory = '1KiB'"),
            "t.toml:1: timeline.memory: found \"1KiB\"; accepted: a size of at least \"16KiB\", \"0B\", or \"auto\"");
}

TEST(Config, a_bad_size_says_why_and_what_is_accepted) {
  const std::string error = parse_error("host.memory = \"12XB\"");
  EXPECT_EQ(error.find("t.toml:1: host.memory: \"12XB\" is not a size: unknown unit \"XB\"; accepted: a size"), 0U);
  EXPECT_NE(error.find("hint: write a number and a unit, such as \"512MiB\""), std::string::npos);
  for (const char* key : {"device.memory", "device.chunks", "host.memory", "nvme.memory", "placement.chunk"}) {
    for (const char* size : {"\"0B\"", "\"-1MiB\"", "\"\"", "\"17000000TiB\"", "\"1048577TiB\"", "[]", "1.5"}) {
      EXPECT_EQ(parse_error(std::string(key) + " = " + size).find("t.toml:1: " + std::string(key) + ": "), 0U);
    }
  }
}

TEST(Config, numbers_out_of_range_are_refused) {
  for (const char* line :
       {"model.layers = 0", "model.heads = 0", "model.width = -1", "model.sequence = 0", "model.layers = 2147483648",
        "train.steps = 0", "train.micro_batch = 0", "train.accumulate = 0", "train.seed = -1", "train.warmup = -1",
        "train.learning_rate = -1e-3", "train.learning_rate = inf", "train.learning_rate = nan",
        "train.weight_decay = -0.1", "train.max_gradient_norm = -1"}) {
    const std::string key(line, std::string(line).find(' '));
    const std::string error = parse_error(line);
    EXPECT_EQ(error.find("t.toml:1: " + key + ": found "), 0U) << error;
    EXPECT_NE(error.find("; accepted: "), std::string::npos) << error;
  }
}

TEST(Config, a_rate_that_an_update_cannot_compute_with_is_refused) {
  EXPECT_EQ(parse_error("train.learning_rate = 1e38"),
            "t.toml:1: train.learning_rate: found 1e+38; accepted: a number from 0 to 1e+37");
  EXPECT_EQ(parse_error("train.weight_decay = 1e300"),
            "t.toml:1: train.weight_decay: found 1e+300; accepted: a number from 0 to 1e+37");
  EXPECT_EQ(parse_error("train.max_gradient_norm = inf"),
            "t.toml:1: train.max_gradient_norm: found inf; accepted: a finite number of 0 or more");
  EXPECT_EQ(Config::parse("train.learning_rate = 1e37").train.learning_rate, 1e37);
  EXPECT_EQ(Config::parse("train.max_gradient_norm = 1e300").train.max_gradient_norm, 1e300);
}

TEST(Config, shares_must_be_parts_that_sum_to_one) {
  EXPECT_EQ(parse_error("placement.parameters = { device = 1.5 }"),
            "t.toml:1: placement.parameters.device: found 1.5; accepted: a number from 0 to 1");
  EXPECT_NE(parse_error("placement.parameters = { device = 1.5, host = -0.5 }"), "no error");
  EXPECT_NE(parse_error("placement.parameters = { device = nan, host = 1 }"), "no error");
  EXPECT_NE(parse_error("placement.parameters = { device = '1' }"), "no error");
  EXPECT_NE(parse_error("placement.parameters = { device = 0.5, host = 0.49999 }"), "no error");
  EXPECT_EQ(parse_error("placement.optimizer = { device = 0.25, host = 0.5 }"),
            "t.toml:1: placement.optimizer: found { device = 0.25, host = 0.5 }; "
            "accepted: \"auto\", or shares such as { device = 0.25, host = 0.75 }\n"
            "  hint: the shares sum to 0.75, not to 1");
  EXPECT_NE(parse_error("placement.optimizer = {}").find("sum to 0"), std::string::npos);
}

TEST(Config, other_choices_are_refused_with_those_there_are) {
  EXPECT_EQ(parse_error("model.dtype = 'float16'"),
            "t.toml:1: model.dtype: found \"float16\"; accepted: \"float32\", \"bfloat16\"");
  EXPECT_NE(parse_error("model.family = 'llama'").find("accepted: \"gpt\""), std::string::npos);
  EXPECT_NE(parse_error("data.tokenizer = 'bpe'").find("accepted: \"bytes\""), std::string::npos);
  EXPECT_NE(parse_error("log.level = 'loud'").find("accepted: \"trace\", \"debug\""), std::string::npos);
  EXPECT_NE(parse_error("placement.parameters = 'host'").find("accepted: \"auto\", or shares"), std::string::npos);
  EXPECT_NE(parse_error("placement.activations = 'drop'").find("accepted: \"auto\", \"keep\", \"host\", \"nvme\""),
            std::string::npos);
}

TEST(Config, activations_on_nvme_need_a_path) {
  const std::string error = parse_error("placement.activations = 'nvme'");
  EXPECT_NE(error.find("placement.activations is \"nvme\", but nvme.paths is empty"), std::string::npos) << error;
}

TEST(Config, a_cuda_device_has_its_own_link) {
  for (const char* setting : {"link = '1GB/s'", "latency_us = 1"}) {
    EXPECT_EQ(parse_error("[device]\nkind = 'cuda'\n" + std::string(setting)),
              "t.toml: device.link and device.latency_us are of the emulated device, but device.kind is \"cuda\"\n"
              "  hint: leave them out, or set device.kind to \"emulated\"");
  }
}

TEST(Config, a_share_on_nvme_needs_a_path) {
  EXPECT_EQ(parse_error("placement.optimizer = { host = 0.5, nvme = 0.5 }"),
            "t.toml: placement.optimizer puts a share of 0.5 on nvme, but nvme.paths is empty\n"
            "  hint: name a folder on a fast disk: nvme.paths = [\"/data/terrace\"]");
  EXPECT_EQ(parse_error("placement.optimizer = { host = 1, nvme = 0 }"), "no error");
}

TEST(Config, blames_what_overrides_a_file_with_it_where_values_do_not_go_together) {
  try {
    Config::parse("", "t.toml", {"placement.parameters={nvme=1}"});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(std::string(error.what()).substr(0, 58), "t.toml with what overrides it: placement.parameters puts a");
  }
}

TEST(Config, chunks_on_the_device_are_part_of_its_memory) {
  EXPECT_EQ(parse_error("[device]\nmemory = '1MiB'\nchunks = '2MiB'")
                .find("t.toml: device.chunks (2MiB) is more than device.memory (1MiB)"),
            0U);
}

TEST(Config, text_that_is_no_toml_names_the_line) {
  for (const char* text : {"[device]\nmemory = \n", "[device]\nmemory = '1MiB'x", "[train]\nsteps = 1\n[train]\n",
                           "\nsteps = \"\xff\"", "\n= 4"}) {
    EXPECT_EQ(parse_error(text).find("t.toml:"), 0U) << parse_error(text);
  }
  EXPECT_EQ(parse_error("[train]\nsteps = 1\nsteps = 2\n").find("t.toml:3: "), 0U);
}

TEST(Config, a_long_value_does_not_swamp_the_message) {
  EXPECT_LT(parse_error("model.dtype = '" + std::string(10'000, 'x') + "'").size(), 300U);
  EXPECT_LT(parse_error("device.memory = '" + std::string(10'000, 'x') + "'").size(), 500U);
  std::string list = "0";
  for (int i = 0; i < 1000; ++i) list += ", 0";
  const std::string error = parse_error("train.steps = [" + list + "]");
  EXPECT_LT(error.size(), 300U);
  EXPECT_EQ(error.find('\n'), std::string::npos);
}

TEST(Config, a_file_that_cannot_be_read_is_named) {
  const TemporaryFolder folder;
  const std::string missing = (folder.path() / "missing.toml").string();
  EXPECT_EQ(error_of([&] { Config::load(missing); }),
            "cannot read configuration " + missing + ": No such file or directory");
  EXPECT_EQ(error_of([&] { Config::load(folder.path()); }),
            "cannot read configuration " + folder.path().string() + ": Is a directory");
}

TEST(Config, what_never_ends_is_not_read_to_its_end) {
  EXPECT_EQ(error_of([] { Config::load("/dev/zero"); }), "cannot read configuration /dev/zero: it has more than 1MiB");
}

TEST(Config, a_pipe_is_read_as_a_file_is) {
  const TemporaryFolder folder;
  const std::string pipe = (folder.path() / "pipe.toml").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const std::jthread writer([&] { std::ofstream(pipe) << "train.steps = 7\n"; });
  EXPECT_EQ(Config::load(pipe).train.steps, 7);
}

TEST(Config, a_file_with_an_error_is_named_with_the_line) {
  const TemporaryFolder folder;
  const auto file = folder.write("terrace.toml", "[train]\nstep = 4\n");
  EXPECT_EQ(error_of([&] { Config::load(file); }).find(file.string() + ":2: unknown key \"train.step\""), 0U);
}

TEST(ConfigSet, an_error_names_the_assignment_and_no_line) {
  EXPECT_EQ(set_error("device.memroy=1MiB"),
            "set \"device.memroy=1MiB\": unknown key \"device.memroy\"\n  hint: did you mean \"device.memory\"?");
  EXPECT_EQ(set_error("train.steps=many"),
            "set \"train.steps=many\": train.steps: found \"many\"; accepted: a whole number from 1 to "
            "9223372036854775807");
  EXPECT_EQ(set_error("placement.parameters={hots=1}").find("set \"placement.parameters={hots=1}\": placement."), 0U);
  EXPECT_EQ(set_error("placement.optimizer={nvme=1}").find("configuration: placement.optimizer puts"), 0U);
}

TEST(ConfigSet, what_is_no_assignment_is_refused) {
  for (const char* text : {"", "=", "=5", "train.steps", " = 5"}) {
    EXPECT_NE(set_error(text).find("write key=value, as in device.memory=64MiB"), std::string::npos) << text;
  }
  EXPECT_NE(set_error("train={steps=5}").find("[train] is a table"), std::string::npos);
  EXPECT_NE(set_error("train.steps=").find("found \"\"; accepted:"), std::string::npos);
  EXPECT_NE(set_error("placement.parameters.device=1").find("did you mean \"placement.parameters\"?"),
            std::string::npos);
}

}  // namespace
}  // namespace terrace
