// Parameters as ordinary tensors for a while: their bytes are there, stay there, and come back under management.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/small_gpt.h"
#include "tests/integration/tight_session.h"

namespace terrace::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t width = tight_width;

struct Model : torch::nn::Module {
  Model() {
    for (int i = 0; i < 7; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
    }
    frozen = register_parameter("frozen", torch::randn({width, width}), /*requires_grad=*/false);
    register_buffer("buffer", torch::ones({3}));
  }
  at::Tensor loss() {
    at::Tensor x = torch::randn({4, width});
    for (auto& layer : layers) {
      x = torch::tanh(layer(x));
    }
    return x.matmul(frozen).pow(2).mean();
  }
  std::vector<torch::nn::Linear> layers;
  at::Tensor frozen;
};

class GatherTest : public ::testing::Test {
 protected:
  GatherTest() {
    torch::manual_seed(3);
    session_.emplace(tight_config());
    model_ = session_->construct([] { return std::make_shared<Model>(); });
    session_->manage(*model_);
  }

  std::optional<Session> session_;
  std::shared_ptr<Model> model_;
};

TEST_F(GatherTest, bytes_can_be_reached_by_pointer_until_the_view_ends) {
  at::Tensor& weight = model_->layers[2]->weight;
  const at::Tensor copy = weight.detach().clone();
  EXPECT_THROW(weight.const_data_ptr(), c10::Error);
  {
    const Gathered view = session_->gather({weight}, Access::read);
    ASSERT_EQ(view.tensors().size(), 1u);
    EXPECT_TRUE(view.tensors()[0].is_same(weight));
    EXPECT_TRUE(same_bits(weight.detach(), copy));
    EXPECT_EQ((weight.accessor<float, 2>()[3][5]), copy[3][5].item<float>());
  }
  EXPECT_THROW(weight.const_data_ptr(), c10::Error);
}

TEST_F(GatherTest, what_is_written_by_pointer_stays_written_wherever_the_chunk_goes) {
  at::Tensor& weight = model_->layers[2]->weight;
  {
    const Gathered view = session_->gather({weight}, Access::write);
    weight.mutable_data_ptr<float>()[17] = 42;
  }
  model_->loss().backward();  // which displaces it
  EXPECT_EQ(weight.flatten()[17].item<float>(), 42);
}

TEST_F(GatherTest, a_module_is_gathered_with_those_within_it) {
  const at::Tensor& weight = model_->layers[0]->weight;
  const Gathered view = session_->gather(*model_->layers[0], Access::read);
  EXPECT_EQ(view.tensors().size(), 2u);
  EXPECT_NO_THROW(weight.const_data_ptr());
  EXPECT_NO_THROW(model_->layers[0]->bias.const_data_ptr());
}

TEST_F(GatherTest, ordinary_tensors_in_a_list_stay_as_they_are) {
  const at::Tensor ordinary = torch::ones({5});
  const Gathered nothing = session_->gather({ordinary}, Access::read);
  EXPECT_EQ(ordinary.const_data_ptr<float>()[4], 1);
  const Gathered view = session_->gather({ordinary, model_->frozen, model_->frozen}, Access::read);
  EXPECT_NO_THROW(model_->frozen.const_data_ptr());
}

TEST_F(GatherTest, ops_run_as_usual_on_what_is_gathered_and_on_the_rest) {
  const at::Tensor before = model_->layers[1]->weight.detach().clone();
  const Gathered view = session_->gather({model_->layers[1]->weight}, Access::write);
  model_->loss().backward();
  {
    const at::NoGradGuard no_grad;
    model_->layers[1]->weight.mul_(2);
  }
  EXPECT_TRUE(same_bits(model_->layers[1]->weight.detach(), before * 2));
  EXPECT_TRUE(model_->layers[1]->weight.grad().defined());
}

TEST_F(GatherTest, more_than_fits_the_device_is_refused_with_what_would_be_enough_and_pins_nothing) {
  try {
    const Gathered view = session_->gather(*model_, Access::read);
    ADD_FAILURE() << "nothing was refused";
  } catch (const OutOfMemory& error) {
    EXPECT_THAT(error.what(), HasSubstr("device.chunks"));
    EXPECT_THAT(error.what(), HasSubstr("at least"));
  }
  EXPECT_THROW(model_->layers[0]->weight.const_data_ptr(), c10::Error);
  EXPECT_NO_THROW(model_->loss().backward());
}

TEST_F(GatherTest, queued_updates_come_first) {
  AdamW optimizer(*session_, AdamW::Options(0.5));
  const at::Tensor before = model_->layers[0]->weight.detach().clone();
  model_->loss().backward();
  optimizer.step();
  const Gathered view = session_->gather({model_->layers[0]->weight}, Access::read);
  EXPECT_FALSE(same_bits(model_->layers[0]->weight.detach(), before));
}

TEST_F(GatherTest, a_step_or_manage_meanwhile_is_refused_by_name_and_works_afterwards) {
  AdamW optimizer(*session_, AdamW::Options(1e-2));
  model_->loss().backward();
  torch::nn::Linear later(width, width);
  {
    const Gathered view = session_->gather({model_->layers[3]->weight}, Access::read);
    EXPECT_THAT(logic_error_of([&] { optimizer.step(); }), HasSubstr("'layer3.weight' is gathered"));
    EXPECT_THAT(logic_error_of([&] { session_->manage(*later); }), HasSubstr("'layer3.weight' is gathered"));
  }
  EXPECT_NO_THROW(optimizer.step());
  EXPECT_NO_THROW(session_->manage(*later));
  EXPECT_NO_THROW(session_->synchronize());
}

TEST_F(GatherTest, a_gradient_that_is_gathered_is_not_moved_from_under_its_holder) {
  model_->loss().backward();
  const at::Tensor held = model_->layers[3]->weight.grad();
  {
    const Gathered view = session_->gather({held}, Access::read);
    model_->zero_grad();
    EXPECT_THAT(logic_error_of([&] { model_->loss().backward(); }), HasSubstr("'layer3.weight.grad'"));
  }
  model_->zero_grad();
  EXPECT_NO_THROW(model_->loss().backward());
}

TEST_F(GatherTest, a_view_may_outlive_its_session) {
  at::Tensor& weight = model_->layers[4]->weight;
  const at::Tensor copy = weight.detach().clone();
  std::optional<Gathered> view(session_->gather({weight}, Access::write));
  weight.mutable_data_ptr<float>()[0] = 7;
  session_.reset();
  EXPECT_EQ(weight.const_data_ptr<float>()[0], 7);
  EXPECT_EQ(weight.const_data_ptr<float>()[1], copy.const_data_ptr<float>()[1]);
  view.reset();
  EXPECT_EQ(weight.const_data_ptr<float>()[0], 7) << "it is an ordinary tensor now";
}

TEST_F(GatherTest, an_op_that_fails_beside_it_leaves_it_open) {
  const Gathered view = session_->gather({model_->layers[0]->weight}, Access::read);
  // Three chunks beside it do not fit.
  EXPECT_THROW(torch::cat({model_->layers[0]->weight, model_->layers[1]->weight, model_->layers[2]->weight,
                           model_->layers[3]->weight}),
               c10::Error);
  EXPECT_NO_THROW(model_->layers[0]->weight.const_data_ptr());
  EXPECT_NO_THROW(model_->layers[1]->weight.sum());
}

TEST_F(GatherTest, for_each_parameter_goes_through_all_of_them_one_at_a_time) {
  std::vector<std::string> names;
  session_->for_each_parameter([&](const std::string& name, at::Tensor& parameter) {
    names.push_back(name);
    EXPECT_TRUE(parameter.is_same(model_->named_parameters()[name]));
    if (name == "layer5.bias") {
      parameter.mutable_data_ptr<float>()[1] = 9;
    }
  });
  EXPECT_EQ(names.size(), model_->parameters().size());
  EXPECT_EQ(model_->layers[5]->bias[1].item<float>(), 9);
}

TEST_F(GatherTest, nothing_is_written_back_of_what_is_only_read) {
  session_->for_each_parameter([](const std::string&, at::Tensor&) {}, Access::read);
  model_->loss();  // displaces all of it
  EXPECT_EQ(session_->memory_usage().moved(Link::device_to_host, Kind::parameter), 0u);
  session_->for_each_parameter([](const std::string&, at::Tensor&) {});
  model_->loss();
  EXPECT_GT(session_->memory_usage().moved(Link::device_to_host, Kind::parameter), 0u);
}

TEST_F(GatherTest, what_no_step_changes_may_stay_gathered_over_one) {
  AdamW optimizer(*session_, AdamW::Options(1e-2));
  const Gathered view = session_->gather({model_->frozen}, Access::read);
  for (int step = 0; step < 2; ++step) {
    model_->loss().backward();
    EXPECT_NO_THROW(optimizer.step());
    optimizer.zero_grad();
  }
  session_->synchronize();
}

TEST_F(GatherTest, for_each_parameter_hands_out_no_handle_to_rebind) {
  EXPECT_THAT(
      logic_error_of([&] { session_->for_each_parameter([](const std::string&, at::Tensor& p) { p = p * 2; }); }),
      HasSubstr("'frozen'"));
  EXPECT_NO_THROW(model_->loss());
}

}  // namespace
}  // namespace terrace::testing
