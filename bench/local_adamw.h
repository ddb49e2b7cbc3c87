#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "tessera/base/types.h"
#include "tessera/optim/adamw_kernel.h"
#include "tessera/storage/private_buffer.h"

namespace tessera::bench {

/// The library's AdamW kernel on a plain model's own fp32 parameters: what an optimizer does where nothing is sharded. Of
/// each parameter it updates the `rank`-th of `ranks` equal parts only, as much work as a rank has when optimizer state is
/// sharded.
class LocalAdamW {
 public:
  LocalAdamW(std::vector<at::Tensor> parameters, Rank rank, int ranks) : parameters_(std::move(parameters)) {
    int64_t elements = 0;
    for (const auto& parameter : parameters_) {
      const int64_t begin = parameter.numel() * rank.value / ranks, end = parameter.numel() * (rank.value + 1) / ranks;
      parts_.push_back({begin, end - begin, elements});
      elements += round_up(end - begin, 16);
    }
    moments_ = PrivateBuffer(Bytes(2 * elements * static_cast<int64_t>(sizeof(float))), "the moments of AdamW");
    second_moments_ = elements;
    updates_.resize(parameters_.size());
  }

  size_t size() const { return parameters_.size(); }
  const at::Tensor& parameter(size_t index) const { return parameters_[index]; }

  /// Updates the part of one parameter from its gradient, and drops the gradient.
  void update(size_t index) {
    at::Tensor& parameter = parameters_[index];
    const at::Tensor gradient = parameter.grad().contiguous();
    const Part part = parts_[index];
    const void* source = gradient.const_data_ptr<float>() + part.begin;
    float* first = reinterpret_cast<float*>(moments_.data()) + part.moments;
    AdamWStep step = hyperparameters_;
    step.step = ++updates_[index];
    adamw_update({{&source, 1}, Element::float32}, step,
                 {.master = static_cast<float*>(parameter.mutable_data_ptr()) + part.begin,
                  .exp_avg = first,
                  .exp_avg_sq = first + second_moments_,
                  .element = Element::float32,
                  .moment_element = Element::float32},
                 part.count);
    parameter.mutable_grad() = at::Tensor();
  }

  void step() {
    for (size_t i = 0; i < size(); ++i) update(i);
  }

 private:
  struct Part {
    int64_t begin, count;  // elements of the parameter
    int64_t moments;       // where in moments_
  };
  // Those of `tessera train`.
  static constexpr AdamWStep hyperparameters_{.lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

  std::vector<at::Tensor> parameters_;
  std::vector<Part> parts_;
  std::vector<int64_t> updates_;
  PrivateBuffer moments_;
  int64_t second_moments_ = 0;  // offset of the second moments, in elements
};

}  // namespace tessera::bench
