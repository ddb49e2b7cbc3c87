#pragma once

#include <torch/torch.h>

#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "tests/support/sharded_helpers.h"

namespace tessera::test {

using Build = std::function<std::shared_ptr<torch::nn::Module>()>;
using Named = std::map<std::string, torch::Tensor>;

/// Can its memory be read?
bool has_values(const torch::Tensor& tensor);

bool same_bits(const torch::Tensor& a, const torch::Tensor& b);

/// All registered parameters and buffers.
Named registered(const torch::nn::Module& module);

/// The parameters and buffers that a sharded module has, whole.
Named whole(const Sharded& sharded, const torch::nn::Module& module);

void expect_equal(const Named& wanted, const Named& got);

/// A module built at once, and the same deferred, from the same seed. Expects that the random stream goes on alike, and that
/// the deferred one took no memory, but for parameters named "real …".
struct Both {
  std::shared_ptr<torch::nn::Module> eager, deferred;
};
Both both(const Build& build);

void expect_materialized_as_eager(const Build& build);

/// The same by fully_shard, in every placement, with values verified and broadcast.
void expect_sharded_as_eager(const Build& build, const UnitPolicy& units, std::initializer_list<int> ranks = {1, 2, 3, 4});

/// A module whose parameters `fill` makes.
struct FilledImpl : torch::nn::Module {
  explicit FilledImpl(const std::function<void(FilledImpl&)>& fill) { fill(*this); }
  torch::Tensor parameter(const std::string& name, torch::Tensor value, bool requires_grad = true) {
    return register_parameter(name, std::move(value), requires_grad);
  }
  torch::Tensor buffer(const std::string& name, torch::Tensor value) { return register_buffer(name, std::move(value)); }
  torch::Tensor plain, view, large;
};
TORCH_MODULE(Filled);

inline Build filled(const std::function<void(FilledImpl&)>& fill) {
  return [fill] { return std::make_shared<FilledImpl>(fill); };
}

}  // namespace tessera::test
