#include "tessera/optim/muon.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {

using at::Tensor;

Tensor orthogonalised(const Tensor& matrix, const MuonOptions& options) {
  const auto [a, b, c] = options.coefficients;
  const bool tall = matrix.size(0) > matrix.size(1);
  Tensor x = matrix.to(options.type);
  if (tall) x = x.t();
  x = x / x.norm().clamp_min(options.eps);  // the spectral norm is at most this one
  for (int i = 0; i < options.iterations; ++i) {
    const Tensor gram = at::mm(x, x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, b, c), x, a);
  }
  return (tall ? x.t() : x).to(matrix.scalar_type());
}

Muon::Muon(const Sharded& sharded, const MuonOptions& options, const Choice& choice) : options_(options) {
  check();
  if (sharded.engine().consumer() != nullptr)
    throw ConfigError(
        "this sharded model has tessera's AdamW attached, which updates all parameters, Muon's too; leave Muon's "
        "other_parameters() to an optimizer of torch::optim instead");
  for (const auto& unit : sharded.engine().units())
    for (ParameterIndex p = 0; p < unit->parameters().size(); ++p) {
      const auto& parameter = unit->parameters()[p];
      if (unit->complex())
        others_.push_back(parameter.shard);
      else
        take(parameter.name, parameter.shard, unit->shape(p), choice);
    }
}

Muon::Muon(const Named& parameters, const MuonOptions& options, const Choice& choice) : options_(options) {
  check();
  for (const auto& [name, values] : parameters) take(name, values, values.sizes(), choice);
}

void Muon::check() const {
  const auto require = [](bool good, const char* name, double value, const char* wanted) {
    if (!good) throw ConfigError(text("Muon's ", name, " must be ", wanted, ", but is ", value));
  };
  require(options_.lr >= 0, "lr", options_.lr, "0 or more");
  require(options_.weight_decay >= 0, "weight_decay", options_.weight_decay, "0 or more");
  require(options_.momentum >= 0 && options_.momentum < 1, "momentum", options_.momentum, "in [0, 1)");
  require(options_.eps > 0, "eps", options_.eps, "more than 0");
  require(options_.iterations > 0 && options_.iterations < 100, "iterations", options_.iterations, "in 1 … 99");
}

void Muon::take(const std::string& name, const Tensor& values, at::IntArrayRef shape, const Choice& choice) {
  if (shape.size() != 2 || !values.is_floating_point() || (choice && !choice(name))) {
    others_.push_back(values);
    return;
  }
  names_.push_back(name);
  if (values.sizes() == shape) {
    const at::NoGradGuard no_grad;
    matrices_.push_back({name, values, at::zeros_like(values.detach())});
  } else if (values.numel() > 0) {
    throw ConfigError(text("Muon needs whole matrices, but this rank has ", values.numel(), " elements of parameter '", name,
                           "' (", c10::str(shape), "); shard with .layouts = {{\"", name,
                           "\", tessera::whole_parameters()}}, or leave it to another optimizer by `choice`"));
  }
}

at::Tensor Muon::momentum(const std::string& name) const {
  for (const auto& matrix : matrices_)
    if (matrix.name == name) return matrix.momentum;
  return {};
}

void Muon::step() {
  const at::NoGradGuard no_grad;
  for (auto& [name, values, momentum] : matrices_) {
    const Tensor& gradient = values.grad();
    if (!gradient.defined()) continue;
    momentum.lerp_(gradient, 1 - options_.momentum);
    const Tensor update =
        orthogonalised(options_.nesterov ? gradient.lerp(momentum, options_.momentum) : momentum, options_);
    const auto rows = static_cast<double>(values.size(0)), columns = static_cast<double>(values.size(1));
    const double factor = options_.adjust_lr == MuonOptions::AdjustLr::original ? std::sqrt(std::max(1.0, rows / columns))
                                                                                : 0.2 * std::sqrt(std::max(rows, columns));
    values.mul_(1 - options_.lr * options_.weight_decay);
    values.add_(update, -options_.lr * factor);
  }
}

void Muon::zero_grad() {
  for (auto& matrix : matrices_) matrix.values.mutable_grad() = Tensor();
}

}  // namespace tessera
