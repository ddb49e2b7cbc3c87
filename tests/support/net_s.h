#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

namespace tessera::test {

/// The net, the numbers and the data that the cases are stated for.
struct NetSImpl : torch::nn::Module {
  NetSImpl();
  torch::Tensor forward(const torch::Tensor& x);
  torch::nn::Linear first{nullptr}, middle{nullptr}, last{nullptr};
};
TORCH_MODULE(NetS);

/// Parameter number t (in registration order), row-major element k: 0.3 · sin(0.37 k + 1.1 t + 0.5).
void set_common_values(torch::nn::Module& module);

/// Rows [begin, end) of the input (`columns` wide) and target of step `s`, counted from 0.
torch::Tensor input_rows(int64_t s, int64_t begin, int64_t end, int64_t columns, torch::Dtype type = torch::kFloat);
torch::Tensor target_rows(int64_t s, int64_t begin, int64_t end, int64_t columns, torch::Dtype type = torch::kFloat);

}  // namespace tessera::test
