// What a configuration holds: defaults, files, overrides and writing it back. See config_error_test.cpp for errors.
#include "base/config.h"

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/base/temporary_folder.h"

namespace terrace {
namespace {

using Paths = std::vector<std::filesystem::path>;

constexpr const char* kEveryKey = R"(
[device]
kind = "emulated"
memory = "64MiB"
chunks = "48MiB"
link = "1.5GB/s"
latency_us = 20
[host]
memory = "1.5GiB"
[nvme]
paths = ["/data/a", "relative/b"]
memory = "100GB"
[placement]
parameters = { device = 0.25, host = 0.75 }
gradients = { host = 1 }
optimizer = { host = 0.5, nvme = 0.5 }
activations = "recompute"
chunk = "2MiB"
order = "use"
[optimizer]
update = "immediate"
[io]
engine = "threads"
block = "512KiB"
depth = 16
prefetch = 3
[timeline]
memory = "64KiB"
[log]
level = "debug"
[model]
family = "gpt"
layers = 12
heads = 6
width = 384
sequence = 128
dtype = "bfloat16"
[data]
paths = ["text"]
tokenizer = "bytes"
[train]
steps = 5
micro_batch = 2
accumulate = 3
seed = 42
learning_rate = 3e-4
warmup = 10
weight_decay = 0
max_gradient_norm = 0.5
)";

Config every_key() {
  Config config;
  config.device = {"emulated", 64ULL << 20, 48ULL << 20, 1'500'000'000, 20};
  config.host = {3ULL << 29};
  config.nvme = {{"/data/a", "relative/b"}, 100'000'000'000};
  config.placement = {Config::Shares{0.25, 0.75, 0},
                      Config::Shares{0, 1, 0},
                      Config::Shares{0, 0.5, 0.5},
                      "recompute",
                      2ULL << 20,
                      "use"};
  config.optimizer = {"immediate"};
  config.io = {"threads", 512 << 10, 16, 3};
  config.timeline = {64 << 10};
  config.log = {LogLevel::debug};
  config.model = {"gpt", 12, 6, 384, 128, "bfloat16"};
  config.data = {{"text"}, "bytes"};
  config.train = {5, 2, 3, 42, 3e-4, 10, 0.0, 0.5};
  return config;
}

TEST(Config, has_a_default_for_every_key) {
  const Config config = Config::parse("");
  EXPECT_EQ(config, Config());
  EXPECT_EQ(config.device.kind, "auto");
  EXPECT_EQ(config.device.memory, std::nullopt);
  EXPECT_EQ(config.placement.parameters, std::nullopt);
  EXPECT_EQ(config.device.link, std::nullopt);
  EXPECT_EQ(config.optimizer.update, "deferred");
  EXPECT_EQ(config.io, (Config::Io{"auto", std::nullopt, 0, 8}));
  EXPECT_EQ(config.timeline.memory, std::nullopt);
  EXPECT_EQ(config.log.level, LogLevel::info);
  EXPECT_EQ(config.model, (Config::Model{"gpt", 4, 4, 256, 256, "float32"}));
  EXPECT_EQ(config.train, (Config::Train{100, 4, 1, 1, 1e-3, 0, 0.1, 1.0}));
}

TEST(Config, reads_every_key) { EXPECT_EQ(Config::parse(kEveryKey), every_key()); }

TEST(Config, reads_dotted_keys_and_tables_of_shares) {
  const Config config = Config::parse("device.memory = '1MiB'\n[placement.parameters]\ndevice = 0.5\nhost = 0.5\n");
  EXPECT_EQ(config.device.memory, 1ULL << 20);
  EXPECT_EQ(config.placement.parameters, (Config::Shares{0.5, 0.5, 0}));
}

TEST(Config, takes_auto_or_unlimited_for_every_optional_value) {
  EXPECT_EQ(Config::parse(R"(
    device = { kind = "auto", memory = "auto", chunks = "auto", link = "unlimited" }
    host.memory = "auto"
    nvme.memory = "auto"
    io.block = "auto"
    [placement]
    parameters = "auto"
    gradients = "auto"
    optimizer = "auto"
    activations = "auto"
    chunk = "auto"
  )"),
            Config());
}

TEST(Config, takes_shares_that_sum_to_one_but_for_rounding) {
  const Config config = Config::parse("placement.parameters = { device = 0.3333333, host = 0.6666667 }");
  EXPECT_EQ(config.placement.parameters, (Config::Shares{0.3333333, 0.6666667, 0}));
  EXPECT_NO_THROW(
      Config::parse("nvme.paths = ['n']\n"
                    "placement.optimizer = { device = 0.1, host = 0.2, nvme = 0.7 }"));
}

TEST(Config, takes_one_path_for_a_list_of_one) {
  EXPECT_EQ(Config::parse("data.paths = 'a folder/b.txt'").data.paths, Paths{"a folder/b.txt"});
}

TEST(Config, loads_a_file_and_then_the_overrides) {
  const TemporaryFolder folder;
  const auto file = folder.write("terrace.toml", "[train]\nsteps = 7\nseed = 3\n");
  const Config config = Config::load(file, {"train.seed=4"});
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.train.seed, 4U);
}

TEST(Config, an_override_may_complete_the_file) {
  const std::string text = "placement.optimizer = { nvme = 1 }";
  EXPECT_THROW(Config::parse(text), ConfigError);
  EXPECT_EQ(Config::parse(text, "t", {"nvme.paths=/tmp/a"}).nvme.paths, Paths{"/tmp/a"});
}

TEST(ConfigSet, takes_a_string_without_quotes) {
  Config config;
  config.set("device.memory=64MiB").set("host.memory = 1.5 GiB ").set("model.dtype=bfloat16").set("log.level=off");
  EXPECT_EQ(config.device.memory, 64ULL << 20);
  EXPECT_EQ(config.host.memory, 3ULL << 29);
  EXPECT_EQ(config.model.dtype, "bfloat16");
  EXPECT_EQ(config.log.level, LogLevel::off);
  config.set("device.memory=auto").set("host.memory=\"2MiB\"");
  EXPECT_EQ(config.device.memory, std::nullopt);
  EXPECT_EQ(config.host.memory, 2ULL << 20);
}

TEST(ConfigSet, takes_numbers_tables_and_lists) {
  Config config;
  config.set("train.steps=5").set("train.learning_rate=3e-4").set("train.weight_decay=0");
  config.set("placement.parameters={device=0.25,host=0.75}").set(R"(nvme.paths=["/tmp/a", "/tmp/b"])");
  EXPECT_EQ(config.train.steps, 5);
  EXPECT_EQ(config.train.learning_rate, 3e-4);
  EXPECT_EQ(config.train.weight_decay, 0);
  EXPECT_EQ(config.placement.parameters, (Config::Shares{0.25, 0.75, 0}));
  EXPECT_EQ(config.nvme.paths, (Paths{"/tmp/a", "/tmp/b"}));
}

TEST(ConfigSet, takes_a_path_with_any_characters) {
  Config config;
  EXPECT_EQ(config.set("data.paths=/tmp/#1 = \"x\".txt").data.paths, Paths{"/tmp/#1 = \"x\".txt"});
  EXPECT_EQ(config.set("data.paths=1\ntrain.steps = 9").data.paths, Paths{"1\ntrain.steps = 9"});
  EXPECT_EQ(config.train.steps, Config().train.steps);
}

TEST(ConfigSet, changes_nothing_when_it_throws) {
  Config config;
  EXPECT_THROW(config.set("placement.gradients={nvme=1}"), ConfigError);
  EXPECT_THROW(config.set_all({"train.steps=5", "train.seed=-1"}), ConfigError);
  EXPECT_EQ(config, Config());
}

TEST(ConfigSet, all_need_to_go_together_only_in_the_end) {
  Config config;
  config.set_all({"placement.gradients={nvme=1}", "nvme.paths=/tmp/a"});
  EXPECT_EQ(config.nvme.paths, Paths{"/tmp/a"});
}

TEST(ConfigValidate, refuses_values_that_a_program_put_there) {
  const auto refused = [](const std::function<void(Config&)>& change) {
    Config config;
    change(config);
    EXPECT_THROW(config.validate(), ConfigError);
  };
  Config().validate();
  every_key().validate();
  refused([](Config& c) { c.model.layers = 0; });
  refused([](Config& c) { c.train.learning_rate = -1; });
  refused([](Config& c) { c.train.weight_decay = std::numeric_limits<double>::quiet_NaN(); });
  refused([](Config& c) { c.train.seed = std::numeric_limits<std::uint64_t>::max(); });
  refused([](Config& c) { c.device.kind = "cpu"; });
  refused([](Config& c) { c.device.kind = "cuda", c.device.latency_us = 1; });
  refused([](Config& c) { c.host.memory = 0; });
  refused([](Config& c) { c.placement.parameters = Config::Shares{0.5, 0.4, 0}; });
  refused([](Config& c) { c.placement.parameters = Config::Shares{0, 0, 1}; });
  refused([](Config& c) { c.device.memory = 1024, c.device.chunks = 2048; });
  refused([](Config& c) { c.device.link = 0; });
  refused([](Config& c) { c.device.latency_us = -1; });
  refused([](Config& c) { c.optimizer.update = "never"; });
  refused([](Config& c) { c.io.depth = -1; });
  refused([](Config& c) { c.io.prefetch = -1; });
}

TEST(ConfigToml, is_read_back_as_the_same_configuration) {
  EXPECT_EQ(Config::parse(to_toml(Config())), Config());
  EXPECT_EQ(Config::parse(to_toml(every_key())), every_key());
  Config odd;
  odd.device.memory = (64ULL << 20) + 1;
  odd.train.learning_rate = 1.0 / 3;
  odd.train.weight_decay = 1e-300;
  odd.train.max_gradient_norm = 1e22;
  odd.train.seed = std::numeric_limits<std::int64_t>::max();
  odd.placement.parameters = Config::Shares{1.0 / 3, 2.0 / 3, 0};
  odd.data.paths = {"a \"quoted\" \\ 'path'", "tab\tand\nline", "Größe/文", "#", std::string(300, 'x')};
  EXPECT_EQ(Config::parse(to_toml(odd)), odd);
}

TEST(ConfigToml, writes_numbers_with_the_fewest_digits) {
  const std::string text = to_toml(Config());
  EXPECT_NE(text.find("\nlearning_rate = 0.001\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\nweight_decay = 0.1\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\nmax_gradient_norm = 1.0\n"), std::string::npos) << text;
}

TEST(ConfigToml, writes_sections_as_a_person_would) {
  const std::string text = to_toml(every_key());
  EXPECT_EQ(text.find("[device]\nkind = \"emulated\"\nmemory = \"64MiB\"\nchunks = \"48MiB\"\n"
                      "link = \"1500MB/s\"\nlatency_us = 20\n\n[host]\n"),
            0U)
      << text;
  EXPECT_NE(text.find("\nparameters = { device = 0.25, host = 0.75, nvme = 0.0 }\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\npaths = [ \"/data/a\", \"relative/b\" ]\n"), std::string::npos) << text;
}

}  // namespace
}  // namespace terrace
