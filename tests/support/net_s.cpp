#include "tests/support/net_s.h"

#include <set>

namespace tessera::test {

NetSImpl::NetSImpl()
    : first(register_module("first", torch::nn::Linear(6, 5))),
      middle(register_module("middle", torch::nn::Linear(5, 5))),
      last(register_module("last", torch::nn::Linear(5, 3))) {}

torch::Tensor NetSImpl::forward(const torch::Tensor& x) { return last(torch::tanh(middle(torch::tanh(first(x))))); }

void set_common_values(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  int64_t t = 0;
  std::set<const void*> seen;  // tied parameters count once
  for (auto& parameter : module.parameters()) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    const auto k = torch::arange(parameter.numel(), torch::kDouble);
    parameter.copy_((0.3 * torch::sin(0.37 * k + 1.1 * static_cast<double>(t++) + 0.5)).view(parameter.sizes()));
  }
}

torch::Tensor input_rows(int64_t s, int64_t begin, int64_t end, int64_t columns, torch::Dtype type) {
  const auto b = torch::arange(begin, end, torch::kDouble).unsqueeze(1), j = torch::arange(columns, torch::kDouble);
  return torch::cos(0.9 * b + 0.5 * j + 0.3 * static_cast<double>(s)).to(type);
}

torch::Tensor target_rows(int64_t s, int64_t begin, int64_t end, int64_t columns, torch::Dtype type) {
  const auto b = torch::arange(begin, end, torch::kDouble).unsqueeze(1), j = torch::arange(columns, torch::kDouble);
  return torch::sin(0.4 * b - 0.7 * j + 0.2 * static_cast<double>(s)).to(type);
}

}  // namespace tessera::test
