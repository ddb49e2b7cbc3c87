#include "models/generate.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "models/counter_random.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::models {
namespace {

void validate(std::span<const int32_t> prompt, const Sampling& sampling) {
  if (prompt.empty()) throw ConfigError("generation needs a prompt of at least one token");
  if (sampling.tokens < 0)
    throw ConfigError(text("the number of tokens to generate must not be negative, but is ", sampling.tokens));
  if (sampling.context < 1) throw ConfigError(text("option context must be at least 1, but is ", sampling.context));
  if (!(sampling.temperature >= 0) || !std::isfinite(sampling.temperature))
    throw ConfigError(text("option temperature must be 0 or more, but is ", sampling.temperature));
  if (sampling.top_k < 0) throw ConfigError(text("option top-k must be 0 (all tokens) or more, but is ", sampling.top_k));
}

/// The token that `bits`, as a number in [0, 1), picks from the distribution of `logits` (fp64, one dim).
int32_t draw(const at::Tensor& logits, const Sampling& sampling, uint64_t bits) {
  if (sampling.temperature == 0) return static_cast<int32_t>(logits.argmax().item<int64_t>());
  const bool some = sampling.top_k > 0 && sampling.top_k < logits.numel();
  const auto [values, tokens] = some ? logits.topk(sampling.top_k) : std::tuple(logits, at::arange(logits.numel()));
  const auto cumulative = ((values - values.max()) / sampling.temperature).exp().cumsum(0);
  const double* sums = cumulative.const_data_ptr<double>();
  const int64_t count = cumulative.numel();
  const double target = std::ldexp(static_cast<double>(bits >> 11), -53) * sums[count - 1];
  const int64_t chosen = std::min<int64_t>(std::upper_bound(sums, sums + count, target) - sums, count - 1);
  return static_cast<int32_t>(tokens[chosen].item<int64_t>());
}

}  // namespace

std::vector<int32_t> generate(const LogitsOf& model, std::span<const int32_t> prompt, const Sampling& sampling) {
  validate(prompt, sampling);
  const torch::NoGradGuard no_grad;
  std::vector<int64_t> seen(prompt.begin(), prompt.end());
  std::vector<int32_t> drawn;
  for (int64_t i = 0; i < sampling.tokens; ++i) {
    const auto length = std::min<int64_t>(sampling.context, static_cast<int64_t>(seen.size()));
    const auto window = torch::tensor(std::vector<int64_t>(seen.end() - length, seen.end())).unsqueeze(0);
    const auto logits = model(window).select(0, 0).select(0, -1).to(torch::kCPU, torch::kDouble);
    if (!logits.isfinite().all().item<bool>())
      throw NonFiniteError(text("the model's logits for generated token ", i, " are not all finite numbers"));
    drawn.push_back(draw(logits, sampling, counter_random(sampling.seed, /*stream=*/2, static_cast<uint64_t>(i))));
    seen.push_back(drawn.back());
  }
  return drawn;
}

}  // namespace tessera::models
