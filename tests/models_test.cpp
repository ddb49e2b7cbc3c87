#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "models/generate.h"
#include "models/llama.h"
#include "tessera/base/error.h"

namespace {

using tessera::ConfigError;
using tessera::NonFiniteError;
using tessera::models::generate;
using tessera::models::Llama;
using tessera::models::LlamaConfig;
using tessera::models::Rotary;
using tessera::models::Sampling;
using torch::Tensor;

LlamaConfig small() {
  return {.layers = 2, .width = 32, .heads = 4, .kv_heads = 4, .hidden = 48, .vocab = 61, .context = 12};
}

Llama seeded(const LlamaConfig& config, uint64_t seed = 0) {
  torch::set_num_threads(1);  // operators this small would only wait for threads
  torch::manual_seed(seed);
  return Llama(config);
}

Tensor some_tokens(const LlamaConfig& config, int64_t batch, int64_t length) {
  torch::manual_seed(7);
  return torch::randint(config.vocab, {batch, length});
}

std::map<std::string, Tensor> parameters_of(const Llama& model) {
  std::map<std::string, Tensor> result;
  for (const auto& item : model->named_parameters()) result.emplace(item.key(), item.value());
  return result;
}

template <class Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no ConfigError";
}

TEST(LlamaConfig, NamesOptionValueAndWhatIsWanted) {
  const auto message = [](auto change) {
    auto config = small();
    change(config);
    return message_of([&] { config.validate(); });
  };
  EXPECT_EQ(message([](auto& c) { c.layers = 0; }), "option layers must be at least 1, but is 0");
  EXPECT_EQ(message([](auto& c) { c.context = -3; }), "option context must be at least 1, but is -3");
  EXPECT_EQ(message([](auto& c) { c.heads = 5; }), "option heads must divide width (32), but is 5; try 4");
  EXPECT_EQ(message([](auto& c) { c.heads = 33; }), "option heads must divide width (32), but is 33; try 32");
  EXPECT_EQ(message([](auto& c) { c.kv_heads = 3; }), "option kv-heads must divide heads (4), but is 3; try 2");
  EXPECT_NE(message([](auto& c) { c.heads = c.kv_heads = 32; }).find("give heads of 1 elements"), std::string::npos);
  EXPECT_NE(message([](auto& c) { c.rope_theta = 0; }).find("rope-theta"), std::string::npos);
  EXPECT_NE(message([](auto& c) { c.norm_eps = std::nan(""); }).find("norm-eps"), std::string::npos);
  EXPECT_THROW(Llama(LlamaConfig{.heads = 7}), ConfigError);
}

TEST(LlamaConfig, CountsParameters) {
  EXPECT_EQ((LlamaConfig{}.parameters()), 69'219'072);
  for (const bool tied : {false, true}) {
    for (const int64_t kv_heads : {1, 2, 4}) {
      auto config = small();
      config.tied = tied;
      config.kv_heads = kv_heads;
      int64_t elements = 0;
      for (const auto& p : seeded(config)->parameters()) elements += p.numel();
      EXPECT_EQ(elements, config.parameters());
    }
  }
}

TEST(Llama, NamesShapesAndOrderAreHuggingFaces) {
  auto config = small();
  config.layers = 1;
  config.kv_heads = 2;
  std::vector<std::pair<std::string, std::vector<int64_t>>> found;
  for (const auto& item : seeded(config)->named_parameters()) found.emplace_back(item.key(), item.value().sizes().vec());
  const std::vector<std::pair<std::string, std::vector<int64_t>>> expected{
      {"model.embed_tokens.weight", {61, 32}},
      {"model.layers.0.self_attn.q_proj.weight", {32, 32}},
      {"model.layers.0.self_attn.k_proj.weight", {16, 32}},
      {"model.layers.0.self_attn.v_proj.weight", {16, 32}},
      {"model.layers.0.self_attn.o_proj.weight", {32, 32}},
      {"model.layers.0.mlp.gate_proj.weight", {48, 32}},
      {"model.layers.0.mlp.up_proj.weight", {48, 32}},
      {"model.layers.0.mlp.down_proj.weight", {32, 48}},
      {"model.layers.0.input_layernorm.weight", {32}},
      {"model.layers.0.post_attention_layernorm.weight", {32}},
      {"model.norm.weight", {32}},
      {"lm_head.weight", {61, 32}},
  };
  EXPECT_EQ(found, expected);
  EXPECT_TRUE(seeded(config)->buffers().empty());
}

TEST(Llama, StartsFromTheSeedAlone) {
  const auto first = parameters_of(seeded(small(), 3)), again = parameters_of(seeded(small(), 3)),
             other = parameters_of(seeded(small(), 4));
  for (const auto& [name, value] : first) {
    EXPECT_TRUE(value.equal(again.at(name))) << name;
    EXPECT_EQ(value.equal(other.at(name)), value.dim() == 1) << name;
  }
}

TEST(Llama, InitialValuesHaveTheStatedSpread) {
  const auto p = parameters_of(
      seeded({.layers = 2, .width = 128, .heads = 4, .kv_heads = 4, .hidden = 256, .vocab = 512, .context = 8}));
  EXPECT_NEAR(p.at("model.embed_tokens.weight").std().item<double>(), 0.02, 4e-4);
  EXPECT_NEAR(p.at("model.layers.1.self_attn.q_proj.weight").std().item<double>(), 0.02, 6e-4);
  EXPECT_NEAR(p.at("model.layers.1.self_attn.o_proj.weight").std().item<double>(), 0.01, 3e-4);
  EXPECT_NEAR(p.at("model.layers.0.mlp.down_proj.weight").std().item<double>(), 0.01, 3e-4);
  EXPECT_TRUE(p.at("model.norm.weight").equal(torch::ones({128})));
}

TEST(Llama, LossStartsNearTheLogarithmOfTheVocabulary) {
  const auto config = small();
  EXPECT_NEAR(seeded(config)->loss(some_tokens(config, 8, 13)).item<double>(), std::log(61.0), 0.05);
}

TEST(Llama, LossIsTheMeanOfEachNextTokensCrossEntropy) {
  const auto config = small();
  auto model = seeded(config);
  const auto tokens = some_tokens(config, 2, 13);
  const auto probabilities = model->forward(tokens.narrow(1, 0, 12)).log_softmax(-1);
  const auto expected = -probabilities.gather(-1, tokens.narrow(1, 1, 12).unsqueeze(-1)).mean();
  EXPECT_NEAR(model->loss(tokens).item<double>(), expected.item<double>(), 1e-5);
}

TEST(Llama, ALaterTokenChangesNothingBefore) {
  const auto config = small();
  auto model = seeded(config);
  auto tokens = some_tokens(config, 2, 12);
  const auto before = model->forward(tokens);
  tokens.select(1, 7).add_(1).remainder_(config.vocab);
  const auto after = model->forward(tokens);
  EXPECT_TRUE(before.narrow(1, 0, 7).allclose(after.narrow(1, 0, 7), 0, 1e-6));
  for (int64_t position = 7; position < 12; ++position)
    EXPECT_FALSE(before.select(1, position).allclose(after.select(1, position), 0, 1e-6)) << position;
}

// The same model once more, from the definitions and with nothing fused.
Tensor plain_llama(const LlamaConfig& c, const std::map<std::string, Tensor>& p, const Tensor& tokens) {
  const int64_t batch = tokens.size(0), length = tokens.size(1), size = c.head_size();
  const auto norm = [&](const Tensor& x, const std::string& name) {
    return x / (x.pow(2).mean(-1, true) + c.norm_eps).sqrt() * p.at(name + ".weight");
  };
  const auto apply = [&](const Tensor& x, const std::string& name) { return x.matmul(p.at(name + ".weight").t()); };
  const auto frequency = torch::pow(c.rope_theta, -torch::arange(0, size, 2, torch::kDouble) / size);
  const auto angle = torch::outer(torch::arange(length, torch::kDouble), frequency).repeat({1, 2});
  const auto heads = [&](const Tensor& x, int64_t count) { return x.view({batch, length, count, size}).transpose(1, 2); };
  const auto rotate = [&](const Tensor& x) {
    const auto halves = x.chunk(2, -1);
    return x * angle.cos() + torch::cat({-halves[1], halves[0]}, -1) * angle.sin();
  };
  const auto future = torch::ones({length, length}, torch::kBool).triu(1);
  auto x = p.at("model.embed_tokens.weight").index({tokens});
  for (int64_t i = 0; i < c.layers; ++i) {
    const auto layer = "model.layers." + std::to_string(i) + ".";
    const auto y = norm(x, layer + "input_layernorm");
    const auto repeat = [&](const Tensor& z) { return z.repeat_interleave(c.heads / c.kv_heads, 1); };
    const auto q = rotate(heads(apply(y, layer + "self_attn.q_proj"), c.heads));
    const auto k = repeat(rotate(heads(apply(y, layer + "self_attn.k_proj"), c.kv_heads)));
    const auto v = repeat(heads(apply(y, layer + "self_attn.v_proj"), c.kv_heads));
    const auto scores =
        (q.matmul(k.transpose(2, 3)) / std::sqrt(size)).masked_fill(future, -std::numeric_limits<double>::infinity());
    x = x +
        apply(scores.softmax(-1).matmul(v).transpose(1, 2).reshape({batch, length, c.width}), layer + "self_attn.o_proj");
    const auto z = norm(x, layer + "post_attention_layernorm");
    const auto gate = apply(z, layer + "mlp.gate_proj");
    x = x + apply(gate * gate.sigmoid() * apply(z, layer + "mlp.up_proj"), layer + "mlp.down_proj");
  }
  return apply(norm(x, "model.norm"), c.tied ? "model.embed_tokens" : "lm_head");
}

TEST(Llama, EqualsItsDefinition) {
  for (const bool tied : {false, true}) {
    for (const int64_t kv_heads : {1, 2, 4}) {
      auto config = small();
      config.tied = tied;
      config.kv_heads = kv_heads;
      auto model = seeded(config);
      model->to(torch::kDouble);
      const auto p = parameters_of(model);
      const torch::NoGradGuard no_grad;
      for (const auto& [name, value] : p) value.mul_(value.dim() == 1 ? 1.5 : 8.0);  // far from the linear regime
      const auto tokens = some_tokens(config, 2, 11);
      // The model's tables are fp32: 1e-6, not 1e-15.
      EXPECT_TRUE(model->forward(tokens).allclose(plain_llama(config, p, tokens), 1e-5, 1e-5)) << kv_heads << tied;
    }
  }
}

TEST(Llama, GroupedHeadsAreRepeatedHeads) {
  auto grouped_config = small();
  grouped_config.kv_heads = 2;
  auto grouped = seeded(grouped_config), whole = seeded(small());
  const torch::NoGradGuard no_grad;
  const auto from = parameters_of(grouped);
  for (const auto& [name, value] : parameters_of(whole)) {
    const bool repeated = name.find("k_proj") != std::string::npos || name.find("v_proj") != std::string::npos;
    const auto& source = from.at(name);
    value.copy_(repeated ? source.view({2, 8, 32}).repeat_interleave(2, 0).view({32, 32}) : source);
  }
  const auto tokens = some_tokens(grouped_config, 2, 12);
  EXPECT_TRUE(grouped->forward(tokens).allclose(whole->forward(tokens), 1e-5, 1e-6));
}

TEST(Llama, GradientsAreTheSlopesOfTheLoss) {
  const LlamaConfig config{.layers = 2, .width = 8, .heads = 2, .kv_heads = 1, .hidden = 12, .vocab = 17, .context = 5};
  auto model = seeded(config);
  model->to(torch::kDouble);
  const auto tokens = some_tokens(config, 2, 6);
  model->loss(tokens).backward();
  const torch::NoGradGuard no_grad;
  constexpr double kStep = 1e-5;
  for (const auto& [name, value] : parameters_of(model)) {
    auto flat = value.view({-1});
    for (int64_t i = 0; i < flat.numel(); i += std::max<int64_t>(1, flat.numel() / 7)) {
      auto element = flat[i];
      element.add_(kStep);
      const double above = model->loss(tokens).item<double>();
      element.sub_(2 * kStep);
      const double below = model->loss(tokens).item<double>();
      element.add_(kStep);
      EXPECT_NEAR(value.grad().view({-1})[i].item<double>(), (above - below) / (2 * kStep), 1e-8) << name << "[" << i << "]";
    }
  }
}

TEST(Llama, EveryParameterGetsAContiguousGradient) {
  for (const bool tied : {false, true}) {
    auto config = small();
    config.tied = tied;
    auto model = seeded(config);
    model->loss(some_tokens(config, 2, 13)).backward();
    for (const auto& [name, value] : parameters_of(model)) {
      ASSERT_TRUE(value.grad().defined()) << name;
      EXPECT_TRUE(value.grad().is_contiguous()) << name;
    }
  }
}

TEST(Llama, WorksInBfloat16) {
  const auto config = small();
  auto exact = seeded(config), narrow = seeded(config);
  narrow->to(torch::kBFloat16);
  const auto tokens = some_tokens(config, 2, 13);
  const auto loss = narrow->loss(tokens);
  EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  EXPECT_NEAR(loss.item<double>(), exact->loss(tokens).item<double>(), 0.02);
  loss.backward();
  for (const auto& [name, value] : parameters_of(narrow)) {
    EXPECT_EQ(value.grad().scalar_type(), torch::kBFloat16) << name;
    EXPECT_TRUE(value.grad().isfinite().all().item<bool>()) << name;
  }
}

TEST(Llama, TrainsAfterAFirstPassUnderInferenceMode) {
  const auto config = small();
  auto model = seeded(config);
  const auto tokens = some_tokens(config, 2, 13);
  {
    const c10::InferenceMode inference;
    model->forward(tokens.narrow(1, 0, 12));
  }
  EXPECT_NO_THROW(model->loss(tokens).backward());
}

TEST(Llama, LearnsABatchByHeart) {
  const auto config = small();
  auto model = seeded(config);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  const auto tokens = some_tokens(config, 2, 13);
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    model->loss(tokens).backward();
    optimizer.step();
  }
  EXPECT_LT(model->loss(tokens).item<double>(), 0.1);
}

TEST(Llama, RefusesTokensItCantRead) {
  const auto config = small();
  auto model = seeded(config);
  EXPECT_EQ(message_of([&] { model->forward(some_tokens(config, 1, 13)); }),
            "a sequence of 13 tokens is longer than the model's context of 12");
  EXPECT_EQ(message_of([&] { model->forward(torch::zeros({3}, torch::kLong)); }),
            "Llama wants tokens as [batch, length], but they have 1 dims");
}

TEST(Rotary, ProductsDependOnTheDistanceAlone) {
  const Rotary rotary(16, 8, 10000.0);
  torch::manual_seed(0);
  const auto rows = rotary.rows(16, torch::kCPU);
  const auto query = rows.rotate(torch::randn({1, 1, 1, 8}).expand({1, 16, 1, 8}));
  const auto key = rows.rotate(torch::randn({1, 1, 1, 8}).expand({1, 16, 1, 8}));
  const auto product = [&](int64_t i, int64_t j) { return query[0][i].mul(key[0][j]).sum().item<double>(); };
  for (int64_t shift = 1; shift < 12; ++shift) EXPECT_NEAR(product(3 + shift, shift), product(3, 0), 1e-5);
  EXPECT_GT(std::abs(product(5, 0) - product(3, 0)), 1e-3);
  EXPECT_EQ(rows.rotate(torch::ones({1, 16, 1, 8}, torch::kBFloat16)).scalar_type(), torch::kBFloat16);
}

// Token t is followed by t + 1 for sure.
Tensor successor(const Tensor& tokens) { return torch::one_hot((tokens + 1).remainder(10), 10).to(torch::kFloat) * 100; }
// Each of ten tokens is as likely as its number says.
Tensor weighted(const Tensor& tokens) {
  return torch::arange(10).to(torch::kFloat).log().expand({1, tokens.size(1), 10}).clone().index_put_({0, "...", 0}, -1e30F);
}

TEST(Generate, FollowsTheModel) {
  const std::vector<int32_t> prompt{3};
  for (const double temperature : {0.0, 1.0})
    EXPECT_EQ(generate(successor, prompt, {.tokens = 8, .temperature = temperature}),
              (std::vector<int32_t>{4, 5, 6, 7, 8, 9, 0, 1}));
  EXPECT_TRUE(generate(successor, prompt, {.tokens = 0}).empty());
}

TEST(Generate, ShowsTheModelAtMostItsContext) {
  const std::vector<int32_t> prompt{1, 2, 3};
  std::vector<int64_t> lengths;
  generate(
      [&](const Tensor& tokens) {
        lengths.push_back(tokens.size(1));
        return successor(tokens);
      },
      prompt, {.tokens = 4, .context = 5});
  EXPECT_EQ(lengths, (std::vector<int64_t>{3, 4, 5, 5}));
}

TEST(Generate, DrawsFromTheDistribution) {
  const std::vector<int32_t> prompt{0};
  const auto count = [&](const Sampling& sampling) {
    std::vector<int> counts(10);
    for (const int32_t token : generate(weighted, prompt, sampling)) ++counts[static_cast<size_t>(token)];
    return counts;
  };
  const auto all = count({.tokens = 4500, .context = 1, .temperature = 1.0});
  for (size_t token = 0; token < 10; ++token) EXPECT_NEAR(all[token], 100.0 * static_cast<double>(token), 100) << token;
  const auto top = count({.tokens = 1700, .context = 1, .temperature = 1.0, .top_k = 2});
  EXPECT_EQ(top[8] + top[9], 1700);
  EXPECT_NEAR(top[8], 800, 100);
}

TEST(Generate, IsAFunctionOfItsSeed) {
  const std::vector<int32_t> prompt{0};
  const auto draw = [&](uint64_t seed) { return generate(weighted, prompt, {.tokens = 20, .seed = seed}); };
  EXPECT_EQ(draw(1), draw(1));
  EXPECT_NE(draw(1), draw(2));
}

TEST(Generate, RefusesWhatCantBe) {
  const std::vector<int32_t> prompt{0};
  EXPECT_THROW(generate(successor, {}, {}), ConfigError);
  EXPECT_THROW(generate(successor, prompt, {.tokens = -1}), ConfigError);
  EXPECT_THROW(generate(successor, prompt, {.context = 0}), ConfigError);
  EXPECT_THROW(generate(successor, prompt, {.temperature = -1}), ConfigError);
  EXPECT_THROW(generate(successor, prompt, {.top_k = -1}), ConfigError);
  EXPECT_THROW(generate([](const Tensor& t) { return successor(t) * std::nan(""); }, prompt, {}), NonFiniteError);
}

}  // namespace
