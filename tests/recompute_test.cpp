// recompute() and other backwards inside a backward, against the same without recomputation.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"

namespace tessera::test {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::nn::Linear;

struct DroppingImpl : torch::nn::Module {
  explicit DroppingImpl(int64_t width) : linear(register_module("linear", Linear(width, width))) {}
  Tensor forward(const Tensor& x) { return torch::dropout(torch::tanh(linear(x)), 0.5, /*train=*/true); }
  Linear linear{nullptr};
};
TORCH_MODULE(Dropping);

// Three blocks with dropout between two linears.
struct StackImpl : torch::nn::Module {
  StackImpl() : first(register_module("first", Linear(6, 8))), last(register_module("last", Linear(8, 3))) {
    for (int i = 0; i < 3; ++i) blocks.push_back(register_module("block" + std::to_string(i), Dropping(8)));
    set_common_values(*this);
  }
  Tensor all_blocks(Tensor x) {
    for (auto& block : blocks) x = block(x);
    return x;
  }
  Linear first{nullptr}, last{nullptr};
  std::vector<Dropping> blocks;
};
TORCH_MODULE(Stack);

using Forward = std::function<Tensor(Stack&, const Tensor&)>;

Tensor plain(Stack& net, const Tensor& x) { return net->last(net->all_blocks(net->first(x))); }
Tensor each_block(Stack& net, const Tensor& x) {
  Tensor h = net->first(x);
  for (auto& block : net->blocks) h = recompute(block, h);
  return net->last(h);
}
Tensor nested(Stack& net, const Tensor& x) {
  const auto tail = [&net](const Tensor& h) {
    return net->blocks[2](recompute([&net](const Tensor& g) { return net->blocks[1](net->blocks[0](g)); }, h));
  };
  return net->last(recompute(tail, net->first(x)));
}
Tensor all_in_one(Stack& net, const Tensor& x) {
  return recompute([&net](const Tensor& input) { return plain(net, input); }, x);
}

// Activation checkpointing as users write it: they know nothing of NestedBackward.
struct HandMade : torch::autograd::Function<HandMade> {
  static Tensor forward(AutogradContext* context, int64_t net, const Tensor& h) {
    context->saved_data["net"] = net;
    context->saved_data["random"] = at::detail::getDefaultCPUGenerator().get_state();
    context->save_for_backward({h});
    const torch::NoGradGuard no_grad;
    return (*reinterpret_cast<Stack*>(net))->all_blocks(h);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const torch::AutoGradMode grad(true);
    at::Generator random = at::detail::getDefaultCPUGenerator();
    random.set_state(context->saved_data["random"].toTensor());
    const Tensor h = context->get_saved_variables()[0].detach().requires_grad_(true);
    (*reinterpret_cast<Stack*>(context->saved_data["net"].toInt()))->all_blocks(h).backward(gradients[0]);
    return {Tensor(), h.grad()};
  }
};
Tensor hand_made(Stack& net, const Tensor& x) {
  return net->last(HandMade::apply(reinterpret_cast<int64_t>(&net), net->first(x)));
}

Tensor loss_of(const Forward& forward, Stack& net, const Tensor& x) {
  torch::manual_seed(7);
  return (forward(net, x) - target_rows(0, 0, 8, 3)).pow(2).mean();
}

void expect_as_unsharded(const Forward& forward) {
  for_every_placement([&](const World& world, const Placements& placements) {
    Stack net, alone;
    auto sharded =
        fully_shard(net, mesh_for(world, placements), {.placements = placements, .units = units_of<DroppingImpl>()});
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1)),
        other(alone->parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      const auto x = input_rows(step, 0, 8, 6).requires_grad_(true), y = x.detach().clone().requires_grad_(true);
      auto loss = loss_of(forward, net, x), expected = loss_of(plain, alone, y);
      loss.backward();
      expected.backward();
      EXPECT_EQ(loss.item<float>(), expected.item<float>());
      EXPECT_TRUE(torch::allclose(x.grad(), y.grad(), 1e-6, 1e-8));
      auto gradients = gradients_of(sharded);
      for (const auto& item : alone->named_parameters())
        EXPECT_TRUE(torch::allclose(gradients[item.key()], item.value().grad(), 1e-6, 1e-8)) << item.key();
      expect_all_sharded(sharded);
      for (auto* each : {&optimizer, &other}) {
        each->step();
        each->zero_grad();
      }
    }
  });
}

TEST(Recompute, EachBlock) { expect_as_unsharded(each_block); }
TEST(Recompute, Nested) { expect_as_unsharded(nested); }
TEST(Recompute, TheWholeModelIsOneNode) { expect_as_unsharded(all_in_one); }
TEST(Recompute, ABackwardInsideAUsersOwnFunction) { expect_as_unsharded(hand_made); }

TEST(Recompute, NoGradIsAPlainCallAndModulesMayReturnVectors) {
  Linear linear(3, 3);
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(recompute(linear, torch::ones({2, 3})).requires_grad());
  }
  const auto both = recompute(
      [&](const Tensor& a, const Tensor& b) {
        return std::vector<Tensor>{linear(a), b * 2};
      },
      torch::ones({2, 3}), torch::ones({2}).requires_grad_(true));
  ASSERT_EQ(both.size(), 2U);
  (both[0].sum() + both[1].sum()).backward();
  EXPECT_TRUE(torch::equal(linear->bias.grad(), torch::full({3}, 2.0)));
}

TEST(Recompute, KeepsNothingButItsInputs) {
  const auto saved = [](bool again) {
    int64_t calls = 0;
    const Tensor x = torch::ones({4}).requires_grad_(true);
    const auto function = [&calls](const Tensor& t) {
      ++calls;
      return t.exp().exp();
    };
    (again ? recompute(function, x) : function(x)).sum().backward();
    return calls;
  };
  EXPECT_EQ(saved(false), 1);
  EXPECT_EQ(saved(true), 2);  // so it was computed anew, from the input
}

TEST(Recompute, AnErrorInTheSecondPassReachesTheUser) {
  on_ranks(2, [](World world) {
    Stack net;
    auto sharded = fully_shard(net, Mesh(world), {.units = units_of<DroppingImpl>()});
    int calls = 0;
    const auto throwing = [&](const Tensor& x) {
      if (++calls == 2) throw std::runtime_error("the second pass");
      return net->all_blocks(x);
    };
    auto loss = net->last(recompute(throwing, net->first(input_rows(0, 0, 8, 6)))).sum();
    EXPECT_THROW(loss.backward(), std::exception);
    EXPECT_THROW(net->first(input_rows(0, 0, 8, 6)), GuardError);  // not silently with half of the gradients
  });
}

}  // namespace
}  // namespace tessera::test
