#include <cstdio>

#include <terrace/terrace.h>
#include <torch/torch.h>

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(middle(torch::relu(first(x))))); }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(64, 1024))};
  torch::nn::Linear middle{register_module("middle", torch::nn::Linear(1024, 1024))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(1024, 1))};
};

int main() {
  terrace::Session session(terrace::Config::parse(R"(
    device.memory = "12MiB"  # the model, its gradients and its optimizer's states take 17 MiB
    host.memory = "64MiB"
  )"));
  torch::manual_seed(1);
  auto model = session.construct([] { return std::make_shared<Net>(); });
  session.manage(*model);
  terrace::AdamW optimizer(session, torch::optim::AdamWOptions(1e-3));
  const at::Tensor input = torch::randn({64, 64});
  const at::Tensor target = input.square().mean(1, /*keepdim=*/true);
  for (int step = 1; step <= 20; ++step) {
    at::Tensor loss = torch::mse_loss(model->forward(input), target);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    std::printf("step %2d  loss %.6f\n", step, loss.item<float>());
  }
}
