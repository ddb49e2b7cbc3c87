#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace tessera::models {

/// A language model as a function: int64 tokens [1, length] → logits [1, length, vocabulary].
using LogitsOf = std::function<at::Tensor(const at::Tensor& tokens)>;

/// How to draw tokens.
struct Sampling {
  int64_t tokens = 200;      ///< how many to draw
  int64_t context = 64;      ///< the model sees at most that many of the last tokens
  double temperature = 0.8;  ///< logits are divided by it; 0 takes the likeliest token
  int64_t top_k = 0;         ///< draw among the k likeliest; 0 means all
  uint64_t seed = 0;         ///< of the draws; torch's default generator is not used
};

/// Draws `sampling.tokens` tokens that continue `prompt` (at least one token), without the prompt. No gradients are
/// recorded. The same on every rank that passes the same arguments and gets the same logits. Throws ConfigError for options
/// that can't be, NonFiniteError if a logit is not a finite number. One call of `model` a token.
std::vector<int32_t> generate(const LogitsOf& model, std::span<const int32_t> prompt, const Sampling& sampling);

}  // namespace tessera::models
