#include "tessera/engine/backward_end.h"

#include <torch/csrc/autograd/engine.h>

#include <exception>
#include <utility>

namespace tessera {
namespace {

thread_local NestedBackward* innermost = nullptr;

}  // namespace

void at_end_of_backward(std::function<void()> action) {
  if (innermost != nullptr)
    innermost->actions_.push_back(std::move(action));
  else
    torch::autograd::Engine::get_default_engine().queue_callback(std::move(action));
}

bool inside_node() { return static_cast<bool>(torch::autograd::get_current_node()); }

NestedBackward::NestedBackward() : outer_(std::exchange(innermost, this)), exceptions_(std::uncaught_exceptions()) {}

NestedBackward::~NestedBackward() {
  innermost = outer_;
  if (std::uncaught_exceptions() > exceptions_) return;
  for (auto& action : actions_) at_end_of_backward(std::move(action));
}

}  // namespace tessera
