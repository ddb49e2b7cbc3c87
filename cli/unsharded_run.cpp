#include "cli/unsharded_run.h"

#include <torch/torch.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numbers>

#include "models/llama.h"

namespace tessera::cli {
namespace {

// One step on the samples of all ranks, in the order of ranks and micro-batches. Sets the masters' gradients; returns the
// mean loss.
double backward_all(const TrainOptions& options, const models::TokenSource& data, int ranks, int64_t step,
                    models::Llama& model, std::vector<torch::Tensor>& masters) {
  const double share = 1.0 / static_cast<double>(ranks * options.accumulate);
  double mean = 0;
  for (auto& master : masters) master.mutable_grad() = torch::zeros_like(master);
  for (int rank = 0; rank < ranks; ++rank)
    for (int64_t micro = 0; micro < options.accumulate; ++micro) {
      const auto loss = model->loss(data.batch(step * options.accumulate + micro, Rank(rank), ranks, options.batch));
      mean += loss.item<double>() * share;
      loss.backward();
      const torch::NoGradGuard no_grad;
      const auto working = model->parameters();
      for (size_t i = 0; i < masters.size(); ++i)
        masters[i].mutable_grad().add_(working[i].grad().to(masters[i].dtype()), share);
      model->zero_grad();
    }
  return mean;
}

}  // namespace

double learning_rate(const TrainOptions& options, int64_t step) {
  if (step < options.warmup) return options.lr * static_cast<double>(step + 1) / static_cast<double>(options.warmup);
  const double done =
      static_cast<double>(step - options.warmup) / static_cast<double>(std::max<int64_t>(1, options.steps - options.warmup));
  const double floor = options.lr * options.min_lr;
  return floor + (options.lr - floor) * 0.5 * (1 + std::cos(std::numbers::pi * done));
}

nlohmann::json compare_with_unsharded(const TrainOptions& options, const models::TokenSource& data, int ranks,
                                      const std::vector<double>& losses,
                                      const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  models::Llama model(options.model);
  std::vector<torch::Tensor> masters;
  for (const auto& parameter : model->parameters()) masters.push_back(parameter.detach().clone());
  if (options.dtype == "bf16") model->to(torch::kBFloat16);
  torch::optim::AdamW optimizer(masters, torch::optim::AdamWOptions(options.lr)
                                             .betas({options.beta1, options.beta2})
                                             .eps(options.eps)
                                             .weight_decay(options.weight_decay));
  double loss_difference = 0;
  for (int64_t step = 0; step < options.steps; ++step) {
    const double loss = backward_all(options, data, ranks, step, model, masters);
    loss_difference = std::max(loss_difference, std::abs(loss - losses[static_cast<size_t>(step)]));
    if (options.clip > 0) torch::nn::utils::clip_grad_norm_(masters, options.clip);
    static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(learning_rate(options, step));
    optimizer.step();
    const torch::NoGradGuard no_grad;
    auto working = model->parameters();
    for (size_t i = 0; i < masters.size(); ++i) working[i].copy_(masters[i]);
  }
  const torch::NoGradGuard no_grad;
  std::map<std::string, torch::Tensor> reference;
  for (const auto& item : model->named_parameters()) reference[item.key()] = item.value();
  double parameter_difference = 0;
  for (const auto& [name, value] : parameters)
    parameter_difference = std::max(
        parameter_difference, (value.to(torch::kFloat) - reference.at(name).to(torch::kFloat)).abs().max().item<double>());
  return {{"loss", loss_difference}, {"parameters", parameter_difference}};
}

}  // namespace tessera::cli
