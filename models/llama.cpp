#include "models/llama.h"

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::models {
namespace {

using torch::Tensor;

constexpr double kDeviation = 0.02;

Tensor normal_matrix(int64_t rows, int64_t columns, double deviation) {
  const torch::NoGradGuard no_grad;
  return torch::empty({rows, columns}).normal_(0.0, deviation);
}

double residual_deviation(const LlamaConfig& config) {
  return kDeviation / std::sqrt(2.0 * static_cast<double>(config.layers));
}

const LlamaConfig& validated(const LlamaConfig& config) {
  config.validate();
  return config;
}

}  // namespace

ProjectionImpl::ProjectionImpl(int64_t inputs, int64_t outputs, double deviation)
    : weight(register_parameter("weight", normal_matrix(outputs, inputs, deviation))) {}

TokenEmbeddingImpl::TokenEmbeddingImpl(int64_t vocab, int64_t width)
    : weight(register_parameter("weight", normal_matrix(vocab, width, kDeviation))) {}

RmsNormImpl::RmsNormImpl(int64_t width, double eps)
    : weight(register_parameter("weight", torch::ones({width}))), eps_(eps) {}

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaConfig& config)
    : head_size_(config.head_size()), grouped_(config.kv_heads != config.heads) {
  const int64_t kv_width = config.kv_heads * head_size_;
  q_proj = register_module("q_proj", Projection(config.width, config.width, kDeviation));
  k_proj = register_module("k_proj", Projection(config.width, kv_width, kDeviation));
  v_proj = register_module("v_proj", Projection(config.width, kv_width, kDeviation));
  o_proj = register_module("o_proj", Projection(config.width, config.width, residual_deviation(config)));
}

Tensor LlamaAttentionImpl::forward(const Tensor& x, const Rotary::Rows& rotary) {
  const auto heads = [&](const Tensor& y) { return y.view({x.size(0), x.size(1), -1, head_size_}); };
  const auto query = rotary.rotate(heads(q_proj(x))).transpose(1, 2);
  const auto key = rotary.rotate(heads(k_proj(x))).transpose(1, 2);
  const auto value = heads(v_proj(x)).transpose(1, 2);
  const auto mixed =
      torch::scaled_dot_product_attention(query, key, value, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true,
                                          /*scale=*/{}, /*enable_gqa=*/grouped_);
  return o_proj(mixed.transpose(1, 2).flatten(2));
}

LlamaMlpImpl::LlamaMlpImpl(const LlamaConfig& config) {
  gate_proj = register_module("gate_proj", Projection(config.width, config.hidden, kDeviation));
  up_proj = register_module("up_proj", Projection(config.width, config.hidden, kDeviation));
  down_proj = register_module("down_proj", Projection(config.hidden, config.width, residual_deviation(config)));
}

Tensor LlamaMlpImpl::forward(const Tensor& x) { return down_proj(torch::silu(gate_proj(x)) * up_proj(x)); }

LlamaBlockImpl::LlamaBlockImpl(const LlamaConfig& config) {
  self_attn = register_module("self_attn", LlamaAttention(config));
  mlp = register_module("mlp", LlamaMlp(config));
  input_layernorm = register_module("input_layernorm", RmsNorm(config.width, config.norm_eps));
  post_attention_layernorm = register_module("post_attention_layernorm", RmsNorm(config.width, config.norm_eps));
}

Tensor LlamaBlockImpl::forward(const Tensor& x, const Rotary::Rows& rotary) {
  const auto y = x + self_attn(input_layernorm(x), rotary);
  return y + mlp(post_attention_layernorm(y));
}

LlamaTrunkImpl::LlamaTrunkImpl(const LlamaConfig& config) : rotary_(config.context, config.head_size(), config.rope_theta) {
  embed_tokens = register_module("embed_tokens", TokenEmbedding(config.vocab, config.width));
  layers = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.layers; ++i) layers->push_back(LlamaBlock(config));
  norm = register_module("norm", RmsNorm(config.width, config.norm_eps));
}

Tensor LlamaTrunkImpl::forward(const Tensor& tokens) {
  const auto rows = rotary_.rows(tokens.size(1), tokens.device());
  auto x = embed_tokens(tokens);
  for (const auto& layer : *layers) x = layer->as<LlamaBlockImpl>()->forward(x, rows);
  return norm(x);
}

LlamaImpl::LlamaImpl(const LlamaConfig& config) : config_(validated(config)) {
  model = register_module("model", LlamaTrunk(config));
  if (!config.tied) lm_head = register_module("lm_head", Projection(config.width, config.vocab, kDeviation));
}

Tensor LlamaImpl::forward(const Tensor& tokens) {
  if (tokens.dim() != 2)
    throw ConfigError(text("Llama wants tokens as [batch, length], but they have ", tokens.dim(), " dims"));
  if (tokens.size(1) > config_.context)
    throw ConfigError(
        text("a sequence of ", tokens.size(1), " tokens is longer than the model's context of ", config_.context));
  const auto x = model(tokens);
  return config_.tied ? torch::linear(x, model->embedding()) : lm_head(x);
}

Tensor LlamaImpl::loss(const Tensor& tokens) {
  const int64_t length = tokens.size(-1) - 1;
  auto logits = forward(tokens.narrow(-1, 0, length)).flatten(0, 1);
  if (logits.scalar_type() != torch::kDouble) logits = logits.to(torch::kFloat);
  return torch::cross_entropy_loss(logits, tokens.narrow(-1, 1, length).flatten());
}

}  // namespace tessera::models
