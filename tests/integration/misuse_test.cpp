// What is not allowed fails clearly: by name, typed, with the way out, and leaves the session usable.

#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"
#include "tests/integration/message_of.h"
#include "tests/integration/mlp.h"
#include "tests/integration/small_gpt.h"
#include "tests/integration/tight_session.h"

namespace terrace::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::uint64_t chunk_bytes = tight_chunk_bytes;
constexpr std::int64_t width = tight_width;

at::Tensor batch() { return torch::randn({8, width}); }

/// What follows "at least " in a hint.
std::string smallest_in(const std::string& hint) {
  const std::string marker = "at least ";
  const std::size_t begin = hint.find(marker);
  if (begin == std::string::npos) {
    return "";
  }
  return hint.substr(begin + marker.size(), hint.find_first_of(", ", begin + marker.size()) - begin - marker.size());
}

}  // namespace

TEST(Misuse, a_second_session_beside_a_live_one_is_refused_and_harms_neither) {
  std::optional<Session> first(tight_config());
  Mlp model(4, width);
  first->manage(model);
  expect_logic_error(HasSubstr("session"), [] { Session second(tight_config()); });
  EXPECT_NO_THROW(model.forward(batch()).backward());
  first.reset();
  EXPECT_NO_THROW(Session third(tight_config()));
}

TEST(Misuse, a_first_step_before_anything_is_managed_is_refused) {
  Session session(tight_config());
  AdamW optimizer(session, torch::optim::AdamWOptions(1e-2));
  Mlp model(4, width);
  expect_logic_error(AllOf(HasSubstr("AdamW: the session manages no parameters"), HasSubstr("Session::manage")),
                     [&] { optimizer.step(); });
  session.manage(model);
  model.forward(batch()).backward();
  EXPECT_NO_THROW(optimizer.step());
}

TEST(Misuse, a_session_that_could_not_begin_does_not_stand_in_the_way_of_the_next) {
  Config config = tight_config();
  config.host.memory = 4096;
  EXPECT_THROW(Session session(config), OutOfMemory);
  EXPECT_NO_THROW(Session session(tight_config()));
}

TEST(Misuse, a_setting_that_the_program_has_misspelt_is_refused_with_those_there_are) {
  const std::vector<std::pair<std::string, std::function<void(Config&)>>> misspelt{
      {"optimizer.accumulate: found \"fp32\"; accepted: \"gradient\", \"float32\"",
       [](Config& config) { config.optimizer.accumulate = "fp32"; }},
      {"optimizer.update: found \"late\"; accepted: \"deferred\", \"immediate\"",
       [](Config& config) { config.optimizer.update = "late"; }},
      {"placement.activations: found \"drop\"", [](Config& config) { config.placement.activations = "drop"; }},
      {"placement.order: found \"size\"", [](Config& config) { config.placement.order = "size"; }},
      {"io.engine: found \"aio\"", [](Config& config) { config.io.engine = "aio"; }},
      {"device.kind: found \"gpu\"", [](Config& config) { config.device.kind = "gpu"; }},
  };
  for (const auto& [text, misspell] : misspelt) {
    Config config = tight_config();
    misspell(config);
    EXPECT_THAT(message_of<ConfigError>([&] { Session session(config); }), HasSubstr(text));
  }
  EXPECT_NO_THROW(Session session(tight_config()));
}

TEST(Misuse, a_setting_that_the_program_has_misspelt_is_refused_by_an_optimizer_without_a_session) {
  Mlp model(4, width);
  const auto refusal_of = [&](const Config::Optimizer& options) {
    const std::string message = message_of<ConfigError>([&] { AdamW(model.parameters(), AdamW::Options(), options); });
    AdamW::Groups groups;
    groups.emplace_back(model.parameters());
    EXPECT_EQ(message_of<ConfigError>([&] { SGD(groups, SGD::Options(1e-2), options); }), message);
    return message;
  };
  EXPECT_THAT(refusal_of({.accumulate = "fp32"}), HasSubstr("accepted: \"gradient\", \"float32\""));
  EXPECT_THAT(refusal_of({.update = "late"}), HasSubstr("accepted: \"deferred\", \"immediate\""));
  EXPECT_THAT(refusal_of({.states = "bf16"}), HasSubstr("optimizer.states: found \"bf16\""));
  EXPECT_THAT(refusal_of({.non_finite = "ignore"}), HasSubstr("optimizer.non_finite: found \"ignore\""));
}

TEST(Misuse, a_step_after_the_session_has_ended_is_refused) {
  std::optional<Session> session(tight_config());
  Mlp model(4, width);
  session->manage(model);
  AdamW optimizer(*session, AdamW::Options(1e-2));
  model.forward(batch()).backward();
  session.reset();
  expect_logic_error(HasSubstr("session"), [&] { optimizer.step(); });
  EXPECT_NO_THROW(optimizer.zero_grad());
  session.emplace(tight_config());  // another session is not the optimizer's
  expect_logic_error(HasSubstr("session"), [&] { optimizer.step(); });
}

TEST(Misuse, the_archive_of_an_optimizer_is_refused_in_favour_of_the_sessions) {
  Session session(tight_config());
  Mlp model(4, width);
  session.manage(model);
  AdamW optimizer(session, AdamW::Options(1e-2));
  expect_logic_error(HasSubstr("Session::save"), [&] {
    torch::serialize::OutputArchive archive;
    optimizer.save(archive);
  });
  expect_logic_error(HasSubstr("Session::save"), [&] {
    std::ostringstream stream;
    torch::save(optimizer, stream);
  });
  expect_logic_error(HasSubstr("Session::save"), [&] {
    torch::serialize::InputArchive archive;
    optimizer.load(archive);
  });
}

TEST(Misuse, chunks_below_one_ops_operands_are_refused_with_the_smallest_setting_that_suffices) {
  Config config = tight_config();
  config.device.chunks = chunk_bytes;  // weight and bias of a layer are two chunks
  std::string smallest;
  {
    Session session(config);
    Mlp model(4, width);
    session.manage(model);
    try {
      model.forward(batch());
      FAIL() << "the op ran";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'layer0."), HasSubstr("device.chunks"), HasSubstr("at least")));
    }
    const auto error = last_error_as<OutOfMemory>(session);
    ASSERT_TRUE(error.has_value());
    smallest = smallest_in(error->hint());
    EXPECT_NO_THROW(model.layers[0]->weight.sum()) << "an op that fits still runs";
  }
  for (const bool enough : {false, true}) {
    Config second = tight_config();
    second.set("device.chunks=" + smallest);
    second.device.chunks = second.device.chunks.value() - (enough ? 0 : 4096);
    Session session(second);
    Mlp model(4, width);
    session.manage(model);
    if (enough) {
      EXPECT_NO_THROW(model.forward(batch()));
    } else {
      EXPECT_THROW(model.forward(batch()), c10::Error);
    }
  }
}

TEST(Misuse, a_device_below_one_ops_operands_is_refused_with_the_smallest_setting_that_suffices) {
  const auto run = [](Session& session, Mlp& model) {
    session.manage(model);
    const torch::NoGradGuard no_grad;
    model.layers[0]->bias.add_(model.layers[1]->bias);  // two chunks, and nothing else is allocated
  };
  Config config = tight_config();
  config.device.chunks.reset();
  config.device.memory = 2 * chunk_bytes;  // the batch is there as well
  std::string smallest;
  {
    Mlp model(4, width);
    Session session(config);
    const at::Tensor x = batch();
    EXPECT_THROW(run(session, model), c10::Error);
    const auto error = last_error_as<OutOfMemory>(session);
    ASSERT_TRUE(error.has_value());
    EXPECT_THAT(error->hint(), HasSubstr("device."));
    smallest = smallest_in(error->hint());
  }
  for (const bool enough : {false, true}) {
    Config second = config;
    second.set("device.memory=" + smallest);
    second.device.memory = second.device.memory.value() - (enough ? 0 : 64);
    Mlp model(4, width);
    Session session(second);
    const at::Tensor x = batch();
    if (enough) {
      EXPECT_NO_THROW(run(session, model)) << smallest;
    } else {
      EXPECT_THROW(run(session, model), c10::Error) << smallest;
    }
  }
}

TEST(Misuse, nothing_is_lost_where_an_ops_operands_do_not_fit) {
  for (const char* setting : {"device.chunks", "device.memory"}) {
    SCOPED_TRACE(setting);
    Config config = tight_config();
    if (setting == std::string("device.chunks")) {
      config.device.chunks = chunk_bytes;
    } else {
      config.device.chunks.reset();
      config.device.memory = 2 * chunk_bytes + 2048;
    }
    Mlp model(4, width);
    std::vector<at::Tensor> expected;
    for (const at::Tensor& parameter : model.parameters()) {
      expected.push_back(parameter.detach().clone());
    }
    const at::Tensor x = torch::randn({2, width});
    {
      Session session(config);
      session.manage(model);
      for (int i = 0; i < 2; ++i) {
        EXPECT_THROW(model.layers[1]->weight.mm(model.layers[2]->weight), c10::Error);
        const auto error = last_error_as<OutOfMemory>(session);
        ASSERT_TRUE(error.has_value());
        EXPECT_THAT(error->hint(), HasSubstr(setting));
        EXPECT_NO_THROW(x.mm(model.layers[i]->weight)) << "what is smaller still runs";
      }
      const torch::NoGradGuard no_grad;
      model.layers[3]->bias.mul_(2);
      expected[7].mul_(2);
    }
    const std::vector<at::Tensor> parameters = model.parameters();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same_bits(parameters[i].detach(), expected[i])) << i;
    }
  }
}

TEST(Misuse, a_budget_below_what_must_rest_is_refused_by_manage_with_a_hint) {
  Config config = tight_config();
  config.host.memory = 4 * chunk_bytes;
  config.timeline.memory = 0;
  config.device.memory = 4 << 20;
  Mlp model(8, width);
  Session session(config);
  try {
    session.manage(model);
    FAIL() << "it fitted";
  } catch (const OutOfMemory& error) {
    EXPECT_THAT(error.hint(), HasSubstr("host.memory"));
  }
}

namespace {

struct WithView : torch::nn::Module {
  explicit WithView(bool whole) {
    base = register_parameter("base", torch::randn({width, width}));
    const at::Tensor view = whole ? base.detach() : base.detach()[3];
    window = register_parameter("window", view);
  }
  at::Tensor base, window;
};

}  // namespace

TEST(Misuse, a_parameter_that_is_a_view_of_another_is_refused_by_name) {
  for (const bool whole : {false, true}) {
    SCOPED_TRACE(whole ? "of all of it" : "of a part");
    Session session(tight_config());
    WithView model(whole);
    expect_logic_error(AllOf(HasSubstr("'window'"), HasSubstr("storage")), [&] { session.manage(model); });
    EXPECT_NO_THROW(model.base.data_ptr()) << "what was refused stays as it was";
  }
}

TEST(Misuse, a_parameter_that_is_a_view_of_a_managed_one_is_refused_by_name) {
  Session session(tight_config());
  Mlp model(4, width);
  session.manage(model);
  torch::nn::Module other;
  other.register_parameter("stolen", model.layers[0]->weight.detach());
  expect_logic_error(AllOf(HasSubstr("'stolen'"), HasSubstr("storage")), [&] { session.manage(other); });
}

TEST(Misuse, a_buffer_over_a_managed_parameter_is_left_to_it) {
  Session session(tight_config());
  Mlp model(4, width);
  model.register_buffer("weight_again", model.layers[0]->weight.detach());
  session.manage(model);
  EXPECT_NO_THROW(session.manage(model));
  EXPECT_ANY_THROW(model.layers[0]->weight.data_ptr());
  EXPECT_TRUE(torch::equal(model.named_buffers()["weight_again"], model.layers[0]->weight));
}

TEST(Misuse, a_parameter_that_cannot_be_updated_any_more_is_refused_at_the_step_by_name_before_any_is) {
  for (const char* what : {"another type", "a view", "another's storage", "no type for AdamW"}) {
    SCOPED_TRACE(what);
    Session session(tight_config());
    Mlp model(4, width);
    session.manage(model);
    AdamW optimizer(session, AdamW::Options(1e-2));
    at::Tensor& weight = model.layers[2]->weight;
    if (what != std::string("no type for AdamW")) {
      model.forward(batch()).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    weight.set_data(what == std::string("a view")              ? torch::zeros({2 * width, width}).slice(0, width)
                    : what == std::string("another's storage") ? model.layers[1]->weight.detach()
                    : what == std::string("another type")      ? torch::zeros({width, width}, at::kBFloat16)
                                                               : torch::zeros({width, width}, at::kDouble));
    const at::Tensor other_before = model.layers[0]->weight.detach().clone();
    weight.sum().backward();
    model.layers[0]->weight.sum().backward();
    expect_logic_error(HasSubstr("'layer2.weight'"), [&] { optimizer.step(); });
    EXPECT_TRUE(same_bits(model.layers[0]->weight.detach().clone(), other_before)) << "nothing was updated";
  }
}

TEST(Misuse, parameters_that_have_become_views_of_one_vector_are_refused_at_the_step_by_name_and_with_the_way_out) {
  Config config = tight_config();
  config.device.chunks.reset();  // they become operands of one op
  Session session(config);
  Mlp model(4, width);
  session.manage(model);
  AdamW optimizer(session, AdamW::Options(1e-2));
  const at::Tensor flat = torch::nn::utils::parameters_to_vector(model.parameters()).detach() * 0.5;
  torch::nn::utils::vector_to_parameters(flat, model.parameters());
  model.forward(batch()).backward();
  expect_logic_error(AllOf(HasSubstr("'layer0.weight'"), HasSubstr("view"), HasSubstr("copy_")),
                     [&] { optimizer.step(); });
  for (at::Tensor& parameter : model.parameters()) {
    parameter.set_data(parameter.detach().clone());
  }
  EXPECT_NO_THROW(optimizer.step());
  EXPECT_ANY_THROW(model.layers[0]->weight.data_ptr()) << "it is managed again";
}

TEST(Misuse, a_parameter_that_was_never_managed_is_refused_at_the_step_by_its_position) {
  Session session(tight_config());
  Mlp model(4, width), stranger(4, width);
  session.manage(model);
  AdamW optimizer(session, {torch::optim::OptimizerParamGroup({model.layers[0]->weight, stranger.layers[0]->weight})},
                  AdamW::Options(1e-2));
  stranger.forward(batch()).backward();
  expect_logic_error(AllOf(HasSubstr("parameter 1 of group 0"), HasSubstr("manage")), [&] { optimizer.step(); });
}

namespace {

/// Everything at rest on NVMe, beside a host that keeps next to nothing.
Config on_nvme(const TemporaryFolder& folder) {
  Config config = tight_config();
  config.host.memory = 6 * chunk_bytes;
  config.timeline.memory = 0;
  config.nvme.paths = {folder.path()};
  config.nvme.memory = 4 << 20;
  config.placement.parameters = config.placement.gradients = config.placement.optimizer =
      Config::Shares{.device = 0, .host = 0, .nvme = 1};
  return config;
}

/// Flips a byte in each page of the store's extents.
void damage_store(const std::filesystem::path& folder) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    ASSERT_TRUE(file.good()) << entry.path();
    const auto size = std::filesystem::file_size(entry.path());
    for (std::uintmax_t at = 4096 + 123; at < size; at += 4096) {
      char byte = 0;
      file.seekg(static_cast<std::streamoff>(at)).read(&byte, 1);
      byte = static_cast<char>(byte ^ 0x10);
      file.seekp(static_cast<std::streamoff>(at)).write(&byte, 1);
    }
    ASSERT_TRUE(file.good()) << entry.path();
    ++files;
  }
  ASSERT_EQ(files, 1);
}

}  // namespace

TEST(Misuse, an_nvme_file_that_was_damaged_surfaces_as_corrupt_data_and_as_an_error_of_the_op) {
  const TemporaryFolder folder;
  const auto session = std::make_unique<Session>(on_nvme(folder));
  Mlp model(8, width);
  session->manage(model);
  for (auto& layer : model.layers) {
    layer->weight.sum();
  }
  damage_store(folder.path());
  std::string damaged;
  for (auto& item : model.named_parameters()) {
    try {
      item.value().sum();
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'" + item.key() + "'"), HasSubstr(folder.path().string())));
      damaged = item.key();
    }
  }
  ASSERT_FALSE(damaged.empty()) << "everything was elsewhere";
  const auto error = last_error_as<CorruptData>(*session);
  ASSERT_TRUE(error.has_value());
  EXPECT_THAT(error->what(), HasSubstr(folder.path().string()));
}

TEST(Misuse, bytes_that_are_damaged_at_the_end_leave_their_parameters_guarded) {
  const TemporaryFolder folder;
  auto session = std::make_unique<Session>(on_nvme(folder));
  const auto model = std::make_shared<Mlp>(8, width);
  session->manage(*model);
  for (auto& layer : model->layers) {
    layer->weight.sum();
  }
  damage_store(folder.path());
  session.reset();  // does not throw
  int guarded = 0;
  for (auto& item : model->named_parameters()) {
    try {
      item.value().data_ptr();
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("'" + item.key() + "'"));
      ++guarded;
    }
  }
  EXPECT_GT(guarded, 0);
  // And are told from others by the next session, which has chunks of its own.
  Session next(tight_config());
  Mlp other(8, width);
  next.manage(other);
  expect_logic_error(HasSubstr("left over"), [&] { next.manage(*model); });
  expect_logic_error(HasSubstr("left over"), [&] { const Gathered view = next.gather(*model, Access::read); });
  for (auto& item : model->named_parameters()) {
    try {
      item.value().data_ptr();
    } catch (const c10::Error&) {
      EXPECT_THROW(item.value().sum(), c10::Error) << item.key();
      EXPECT_THROW(item.value().add(other.layers[0]->weight.sum()), c10::Error) << item.key();
    }
  }
  EXPECT_NO_THROW(other.layers[0]->weight.sum());
}

TEST(Misuse, damage_that_the_update_meets_reaches_the_program) {
  const TemporaryFolder folder;
  Session session(on_nvme(folder));
  Mlp model(8, width);
  session.manage(model);
  AdamW optimizer(session, AdamW::Options(1e-2));
  for (int i = 0; i < 2; ++i) {
    optimizer.zero_grad();
    model.forward(batch()).backward();
    if (i == 0) {
      optimizer.step();
    }
  }
  damage_store(folder.path());
  optimizer.step();  // queues the update
  EXPECT_THROW(session.synchronize(), CorruptData);
  EXPECT_THROW(optimizer.step(), CorruptData) << "and from now on";
  EXPECT_THROW(model.forward(batch()), c10::Error);
  EXPECT_TRUE(session.last_error());
}

}  // namespace terrace::testing
