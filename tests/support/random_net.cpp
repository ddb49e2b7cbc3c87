#include "tests/support/random_net.h"

#include <set>

#include "tessera/engine/recompute.h"

namespace tessera::test {
namespace {

using torch::Tensor;
using torch::nn::Linear;
using torch::nn::LinearOptions;

/// x + gate · out(gelu(in(norm(x)))), with a gate of one element. The norm's large eps keeps rows that are nearly constant
/// well-conditioned.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t inner)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}).eps(0.1)))),
        in(register_module("in", Linear(width, inner))),
        out(register_module("out", Linear(LinearOptions(inner, width).bias(false)))),
        gate(register_parameter("gate", torch::full({}, 0.7))) {}
  Tensor forward(const Tensor& x) { return x + gate * out(torch::gelu(in(norm(x)))); }
  torch::nn::LayerNorm norm;
  Linear in, out;
  Tensor gate;
};
TORCH_MODULE(Block);

/// x + out(attention(x)) in two heads, of each row to the rows before it.
struct AttentionImpl : torch::nn::Module {
  AttentionImpl(int64_t width, int64_t head)
      : qkv(register_module("qkv", Linear(width, 6 * head))), out(register_module("out", Linear(2 * head, width))) {}
  Tensor forward(const Tensor& x) {
    const auto parts = qkv(x).view({x.size(0), 3, 2, -1}).permute({1, 2, 0, 3}).unbind(0);
    const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, /*is_causal=*/true);
    return x + out(mixed.transpose(0, 1).flatten(1));
  }
  Linear qkv, out;
};
TORCH_MODULE(Attention);

/// A second owner of a parameter.
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(const Tensor& shared) : weight(register_parameter("weight", shared, shared.requires_grad())) {}
  Tensor weight;
};
TORCH_MODULE(Tied);

}  // namespace

RandomNetImpl::RandomNetImpl(uint64_t seed, const RandomNetOptions& options) : random_(seed), type_(options.type) {
  torch::manual_seed(seed);
  optional_allowed_ = options.optional;
  if (chance(0.5)) {
    const int64_t size = draw(1, 6);
    embedding_ = register_module("embedding", torch::nn::Embedding(kTokens, size));
    width_ += size;
    words_ = "embedding " + std::to_string(size);
  }
  for (int64_t stages = std::min(draw(1, 7), options.most_stages); stages > 0; --stages) add_random_stage();
  if (embedding_ && chance(0.6))
    to_tokens_ = register_module("to_tokens", Linear(width_, embedding_->options.embedding_dim()));
  head_ = register_module("head", Linear(width_, kTargets));
  if (options.frozen) freeze_some();
  to(options.type);
}

Linear RandomNetImpl::new_linear(int64_t inputs, int64_t outputs) {
  linears_.push_back(register_module(fresh_name("linear"), Linear(LinearOptions(inputs, outputs).bias(chance(0.7)))));
  return linears_.back();
}

void RandomNetImpl::add(const std::string& words, const Stage& stage, bool keeps_width) {
  const bool optional = optional_allowed_ && keeps_width && chance(0.25);
  steps_.push_back({stage, optional ? optionals_++ : -1});
  words_ += (words_.empty() ? "" : ", ") + words + (optional ? " (optional)" : "");
}

void RandomNetImpl::add_random_stage() {
  switch (draw(0, 10)) {
    case 0:
    case 1:
      return add_linear();
    case 2:
      return add_convolution();
    case 3:
      return add_activation();
    case 4:
    case 5:
      return add_residual<Block>("block", register_module(fresh_name("block"), Block(width_, draw(1, 9))));
    case 10:
      return add_residual<Attention>("attention", register_module(fresh_name("attention"), Attention(width_, draw(1, 5))));
    case 6:
      return add_borrowed();
    case 7: {
      const auto scale = register_parameter(fresh_name("scale"), torch::full({}, 1.3));
      return add("scale", [scale](const Tensor& x) { return x * scale; });
    }
    case 8: {
      Linear twice = new_linear(width_, width_);
      return add("linear twice", [twice](const Tensor& x) mutable { return torch::tanh(twice(torch::tanh(twice(x)))); });
    }
    default: {
      new_linear(draw(1, 9), draw(1, 9));
      words_ += ", an unused linear";
    }
  }
}

void RandomNetImpl::add_linear() {
  const int64_t outputs = chance(0.4) ? width_ : draw(2, 13);
  Linear linear = new_linear(width_, outputs);
  add(
      "linear " + std::to_string(width_) + "→" + std::to_string(outputs),
      [linear](const Tensor& x) mutable { return torch::tanh(linear(x)); }, outputs == width_);
  width_ = outputs;
}

void RandomNetImpl::add_convolution() {
  const int64_t channels = draw(1, 3);
  if (width_ % 2 == 0 && chance(0.5)) {
    torch::nn::Conv2d conv =
        register_module(fresh_name("conv"), torch::nn::Conv2d(torch::nn::Conv2dOptions(1, channels, {2, 1})));
    add(
        "convolution in 2",
        [conv](const Tensor& x) mutable {
          return torch::tanh(conv(x.view({x.size(0), 1, 2, -1})).flatten(1));
        },
        false);
    width_ = channels * width_ / 2;
  } else {
    torch::nn::Conv1d conv = register_module(
        fresh_name("conv"), torch::nn::Conv1d(torch::nn::Conv1dOptions(1, channels, 3).padding(1).bias(chance(0.5))));
    add(
        "convolution in 1", [conv](const Tensor& x) mutable { return torch::tanh(conv(x.unsqueeze(1)).flatten(1)); }, false);
    width_ = channels * width_;
  }
}

void RandomNetImpl::add_activation() {
  const int64_t kind = draw(0, 3);
  add("activation", [kind](const Tensor& x) {
    return kind == 0 ? torch::silu(x) : kind == 1 ? torch::gelu(x) : kind == 2 ? torch::softplus(x) : torch::sigmoid(x);
  });
}

template <class Part>
void RandomNetImpl::add_residual(const std::string& words, Part part) {
  // One that only some ranks leave out is not recomputed: ranks have to recompute the same parts.
  if (chance(0.3))
    add(
        words + " recomputed", [part](const Tensor& x) { return recompute(part, x); }, /*keeps_width=*/false);
  else
    add(words, [part](const Tensor& x) mutable { return part(x); });
}

// Uses a parameter of an earlier layer by itself; perhaps registers it a second time, too.
void RandomNetImpl::add_borrowed() {
  for (auto& linear : linears_) {
    if (linear->options.in_features() != width_) continue;
    const auto weight = linear->weight;
    if (chance(0.5)) register_module(fresh_name("tied"), Tied(weight));
    add("borrowed weight", [weight](const Tensor& x) { return x + torch::tanh(torch::linear(x, weight)).mean(1, true); });
    return;
  }
  for (auto& linear : linears_) {
    if (linear->options.out_features() != width_ || !linear->bias.defined()) continue;
    const auto bias = linear->bias;
    return add("borrowed bias", [bias](const Tensor& x) { return x * (1 + bias); });
  }
  add_linear();
}

void RandomNetImpl::freeze_some() {
  for (auto& [name, parameter] : unique_parameters()) {
    if (name.starts_with("head") || !chance(0.15)) continue;
    parameter.set_requires_grad(false);
    words_ += ", frozen " + name;
  }
}

Tensor RandomNetImpl::loss(uint64_t seed, int64_t rows, uint64_t without) {
  torch::manual_seed(seed);
  auto x = torch::randn({rows, kInputs}, torch::kDouble).to(type_);
  const auto target = torch::randn({rows, kTargets}, torch::kDouble).to(type_),
             tokens = torch::randint(kTokens, {rows}, torch::kLong);
  if (embedding_) x = torch::cat({x, embedding_(tokens)}, 1);
  for (const auto& [stage, optional] : steps_)
    if (optional < 0 || (without >> optional & 1) == 0) x = stage(x);
  auto loss = torch::mse_loss(head_(x), target);
  if (to_tokens_) loss = loss + 0.3 * torch::cross_entropy_loss(torch::linear(to_tokens_(x), embedding_->weight), tokens);
  return loss;
}

std::string RandomNetImpl::description() const { return words_; }

std::vector<std::pair<std::string, Tensor>> RandomNetImpl::unique_parameters() const {
  std::vector<std::pair<std::string, Tensor>> unique;
  std::set<const void*> seen;
  for (const auto& item : named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) unique.emplace_back(item.key(), item.value());
  return unique;
}

}  // namespace tessera::test
