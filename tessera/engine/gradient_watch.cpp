#include "tessera/engine/gradient_watch.h"

#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "tessera/base/check.h"

namespace tessera {
namespace {

class WatchedGradient final : public torch::autograd::AutogradMeta {
 public:
  explicit WatchedGradient(std::function<void()> missing) : missing_(std::move(missing)) {}
  const at::Tensor& grad() const override {
    if (!grad_.defined()) missing_();
    return grad_;
  }

 private:
  std::function<void()> missing_;
};

}  // namespace

void watch_missing_gradient(const at::Tensor& parameter, std::function<void()> missing) {
  TESSERA_CHECK(!parameter.is_view() && !parameter.grad_fn(), "a shard is a leaf");
  const bool trained = parameter.requires_grad();
  parameter.unsafeGetTensorImpl()->set_autograd_meta(std::make_unique<WatchedGradient>(std::move(missing)));
  parameter.set_requires_grad(trained);
}

}  // namespace tessera
