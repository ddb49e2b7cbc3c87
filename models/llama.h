#pragma once

#include <torch/torch.h>

#include "models/llama_config.h"
#include "models/rotary.h"

namespace tessera::models {

/// [..., inputs] → [..., outputs] by a matrix [outputs, inputs] without bias, drawn from normal(0, deviation) by torch's
/// default generator. torch::nn::Linear would draw initial values of its own first.
class ProjectionImpl : public torch::nn::Module {
 public:
  ProjectionImpl(int64_t inputs, int64_t outputs, double deviation);
  torch::Tensor forward(const torch::Tensor& x) const { return torch::linear(x, weight); }
  torch::Tensor weight;
};
TORCH_MODULE(Projection);

/// int64 tokens [...] → rows [..., width] of a matrix [vocab, width], drawn from normal(0, 0.02).
class TokenEmbeddingImpl : public torch::nn::Module {
 public:
  TokenEmbeddingImpl(int64_t vocab, int64_t width);
  torch::Tensor forward(const torch::Tensor& tokens) const { return torch::embedding(weight, tokens); }
  torch::Tensor weight;
};
TORCH_MODULE(TokenEmbedding);

/// x / sqrt(mean(x²) + eps) · weight over the last dim (Zhang and Sennrich, 2019).
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t width, double eps);
  torch::Tensor forward(const torch::Tensor& x) const { return torch::rms_norm(x, weight.sizes(), weight, eps_); }
  torch::Tensor weight;

 private:
  double eps_;
};
TORCH_MODULE(RmsNorm);

/// Causal self-attention with rotary positions; query heads may share key and value heads (Ainslie et al., "GQA", 2023).
class LlamaAttentionImpl : public torch::nn::Module {
 public:
  explicit LlamaAttentionImpl(const LlamaConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const Rotary::Rows& rotary);  ///< [batch, length, width] → the same

 private:
  int64_t head_size_;
  bool grouped_;
  Projection q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
};
TORCH_MODULE(LlamaAttention);

/// down(silu(gate(x)) · up(x)): the SwiGLU feed-forward (Shazeer, 2020).
class LlamaMlpImpl : public torch::nn::Module {
 public:
  explicit LlamaMlpImpl(const LlamaConfig& config);
  torch::Tensor forward(const torch::Tensor& x);  ///< [batch, length, width] → the same

 private:
  Projection gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(LlamaMlp);

/// Attention and feed-forward, each after a norm and added to the residual stream. The usual unit of sharding.
class LlamaBlockImpl : public torch::nn::Module {
 public:
  explicit LlamaBlockImpl(const LlamaConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const Rotary::Rows& rotary);  ///< [batch, length, width] → the same

 private:
  LlamaAttention self_attn{nullptr};
  LlamaMlp mlp{nullptr};
  RmsNorm input_layernorm{nullptr}, post_attention_layernorm{nullptr};
};
TORCH_MODULE(LlamaBlock);

/// Embedding, blocks and last norm: what Hugging Face's parameter names call `model`.
class LlamaTrunkImpl : public torch::nn::Module {
 public:
  explicit LlamaTrunkImpl(const LlamaConfig& config);
  torch::Tensor forward(const torch::Tensor& tokens);  ///< int64 [batch, length] → [batch, length, width]
  const torch::Tensor& embedding() const { return embed_tokens->weight; }

 private:
  Rotary rotary_;
  TokenEmbedding embed_tokens{nullptr};
  torch::nn::ModuleList layers{nullptr};
  RmsNorm norm{nullptr};
};
TORCH_MODULE(LlamaTrunk);

/// A Llama-style language model. Parameter names, shapes and order are those of Hugging Face's LlamaForCausalLM; no biases,
/// no dropout. Matrices start as normal(0, 0.02), those that write into the residual stream (`o_proj`, `down_proj`) smaller
/// by sqrt(2 · layers), norms as ones. All draws come from torch's default generator in the order of named_parameters(): the
/// same seed gives the same bits. Works in fp32, bf16 and fp64, on any device (`to(...)`).
class LlamaImpl : public torch::nn::Module {
 public:
  /// Throws ConfigError for a shape that can't be (LlamaConfig::validate).
  explicit LlamaImpl(const LlamaConfig& config);

  /// int64 [batch, length] → logits [batch, length, vocab] in the parameters' dtype. Throws ConfigError if the tokens have
  /// another number of dims or are longer than the context.
  torch::Tensor forward(const torch::Tensor& tokens);

  /// int64 [batch, length + 1] → the mean cross entropy, in nats, of each token given those before it: a 0-dim tensor, at
  /// least fp32.
  torch::Tensor loss(const torch::Tensor& tokens);

  const LlamaConfig& config() const { return config_; }

 private:
  LlamaConfig config_;
  LlamaTrunk model{nullptr};
  Projection lm_head{nullptr};  // empty when tied
};
TORCH_MODULE(Llama);

}  // namespace tessera::models
