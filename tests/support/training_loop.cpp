#include "tests/support/training_loop.h"

#include <algorithm>
#include <map>
#include <set>

namespace tessera::test {

NamedTensors parameters_of(const torch::nn::Module& module) {
  NamedTensors all;
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) all.emplace_back(item.key(), item.value());
  return all;
}

void make_gradients_dense(const torch::nn::Module& module) {
  for (auto [name, parameter] : parameters_of(module))
    if (parameter.grad().defined() && parameter.grad().is_sparse()) parameter.mutable_grad() = parameter.grad().to_dense();
}

NamedTensors gradients_of(const torch::nn::Module& module) {
  NamedTensors all;
  for (const auto& [name, parameter] : parameters_of(module)) all.emplace_back(name, parameter.grad());
  return all;
}

void expect_close(const NamedTensors& got, const NamedTensors& wanted, const std::string& what) {
  const torch::NoGradGuard no_grad;
  std::map<std::string, torch::Tensor> expected(wanted.begin(), wanted.end());
  ASSERT_EQ(got.size(), wanted.size()) << what;
  double largest = 0.1;
  for (const auto& [name, tensor] : wanted)
    if (tensor.defined() && tensor.numel() > 0) largest = std::max(largest, tensor.abs().max().item<double>());
  for (const auto& [name, tensor] : got) {
    ASSERT_TRUE(expected.count(name)) << what << ": " << name;
    const auto& other = expected[name];
    if (other.defined() && other.numel() == 0) continue;  // a gradient without elements may be none
    ASSERT_EQ(tensor.defined(), other.defined()) << what << ": " << name;
    if (!tensor.defined()) continue;
    ASSERT_EQ(tensor.sizes(), other.sizes()) << what << ": " << name;
    const double tolerance = other.scalar_type() == torch::kDouble ? 1e-12 : 1e-6;
    EXPECT_LE((tensor.to(torch::kDouble) - other.to(torch::kDouble)).abs().max().item<double>(), tolerance * largest)
        << what << ": " << name;
  }
}

}  // namespace tessera::test
