// Hooks on gradients: the user's own before the reduction, and those on reduced gradients.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;

void expect_same_parameters(const Sharded& sharded, NetS& wanted) {
  const auto parameters = wanted->named_parameters();
  for (const auto& [name, value] : sharded.full_parameters())
    EXPECT_TRUE(torch::allclose(value, parameters[name], 1e-5, 1e-6)) << name << '\n' << value << parameters[name];
}

// The loss over rank `rank` of `ranks`' rows.
Tensor part_of_loss(NetS& net, int rank, int ranks, int64_t step) {
  return net_s_loss(net, World{.rank = Rank(rank), .size = ranks}, step);
}

class CountingHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit CountingHook(std::vector<Tensor>& seen) : seen_(seen) {}
  void operator()(const Tensor& parameter) override {
    seen_.push_back(parameter.grad().clone());
    parameter.mutable_grad().mul_(2);
  }

 private:
  std::vector<Tensor>& seen_;
};

// One registered before sharding and one after, each rank its own; in the unsharded run they are applied to each rank's
// part.
TEST(GradientHooks, OnTheModulesParametersSeeTheUnreducedGradient) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    int calls = 0;
    const auto hook = [&calls](const Tensor& gradient, int rank) {
      ++calls;
      return gradient.clamp(-0.05, 0.05) * (rank + 1);
    };
    net->first->weight.register_hook([&](const Tensor& gradient) { return hook(gradient, world.rank.value); });
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    net->middle->bias.register_hook([&](const Tensor& gradient) { return hook(gradient, world.rank.value); });
    AdamW optimizer(sharded, {.lr = 0.02});
    torch::optim::AdamW reference(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.01));
    for (int64_t step = 0; step < 3; ++step) {
      calls = 0;
      net_s_loss(net, world, step).backward();
      EXPECT_EQ(calls, 2);
      std::vector<Tensor> sums;
      for (int r = 0; r < world.size; ++r) {
        const auto own = torch::autograd::grad({part_of_loss(plain, r, world.size, step)}, plain->parameters());
        const auto names = plain->named_parameters().keys();
        for (size_t i = 0; i < own.size(); ++i) {
          const bool hooked = names[i] == "first.weight" || names[i] == "middle.bias";
          const Tensor mean = (hooked ? hook(own[i], r) : own[i]) / world.size;
          if (r == 0)
            plain->parameters()[i].mutable_grad() = mean;
          else
            plain->parameters()[i].mutable_grad() += mean;
        }
      }
      optimizer.step();
      optimizer.zero_grad();
      reference.step();
      expect_same_parameters(sharded, plain);
    }
  });
}

// A tensor has one place for such a hook: one that was there before, and one that came later, are called and do what they
// do.
TEST(GradientHooks, AUsersPostAccumulateHookGoesOnWorking) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    std::vector<Tensor> before, after;
    const auto put = [](const Tensor& parameter, std::vector<Tensor>& seen) {
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<CountingHook>(seen));
    };
    put(net->first->weight, before);
    std::optional<Sharded> sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    put(net->last->weight, after);
    net_s_loss(net, world, 0).backward();
    net_s_loss(plain, World{}, 0).backward();
    ASSERT_TRUE(before.size() == 1 && after.size() == 1);
    auto own = common_net();
    net_s_loss(own, world, 0).backward();
    EXPECT_TRUE(torch::allclose(before[0], own->first->weight.grad(), 1e-5, 1e-7));
    EXPECT_TRUE(torch::allclose(after[0], own->last->weight.grad(), 1e-5, 1e-7));
    const auto gradients = gradients_of(*sharded);
    for (const auto& item : plain->named_parameters()) {
      const double factor = item.key() == "first.weight" || item.key() == "last.weight" ? 2 : 1;
      EXPECT_TRUE(torch::allclose(gradients.at(item.key()), item.value().grad() * factor, 1e-5, 1e-6)) << item.key();
    }
    sharded->zero_grad();
    sharded.reset();  // and it is there when the model is no longer sharded
    EXPECT_NE(torch::autograd::impl::post_acc_grad_hooks(net->first->weight), nullptr);
    EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(net->first->bias), nullptr);
  });
}

class TakingHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  void operator()(const Tensor& parameter) override { parameter.mutable_grad() = Tensor(); }
};

TEST(GradientHooks, AGradientThatAHookTakesAwayIsNone) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    if (world.rank.value == 0) {
      torch::autograd::impl::set_post_acc_grad_hooks(net->first->weight, std::make_unique<TakingHook>());
      torch::autograd::impl::set_post_acc_grad_hooks(net->last->bias, std::make_unique<TakingHook>());
    }
    if (world.rank.value == 1)
      torch::autograd::impl::set_post_acc_grad_hooks(net->last->bias, std::make_unique<TakingHook>());
    net_s_loss(net, world, 0).backward();
    const auto gradients = gradients_of(sharded);
    auto plain = common_net();
    for (int r = 1; r < world.size; ++r) (part_of_loss(plain, r, world.size, 0) / world.size).backward();
    if (world.size == 1)
      EXPECT_FALSE(gradients.at("first.weight").defined());
    else
      EXPECT_TRUE(torch::allclose(gradients.at("first.weight"), plain->first->weight.grad(), 1e-5, 1e-6));
    EXPECT_EQ(gradients.at("last.bias").defined(), world.size > 2);
    EXPECT_TRUE(gradients.at("middle.weight").defined());
  });
}

// `change` is given the whole gradient in the unsharded run; it treats elements one by one.
void expect_as_unsharded(const std::function<void(const std::string&, Tensor&)>& change, bool clip) {
  for_every_placement([&](const World& world, const Placements& placements) {
    for (const LayoutKind& layout : {flat(), per_parameter(), per_parameter(1)})
      for (const bool ours : {true, false}) {
        auto net = common_net(), plain = common_net();
        auto options = net_s_options(placements);
        options.layouts = {{"*.weight", layout}};
        auto sharded = fully_shard(net, mesh_for(world, placements), options);
        std::map<std::string, int> calls;
        sharded.on_reduced_gradient("*.weight", [&](const std::string& name, Tensor& gradient) {
          ++calls[name];
          change(name, gradient);
        });
        std::optional<AdamW> adamw;
        std::optional<torch::optim::AdamW> theirs;
        const auto like = torch::optim::AdamWOptions(0.02).weight_decay(0.01);
        if (ours)
          adamw.emplace(sharded, AdamWOptions{.lr = 0.02});
        else
          theirs.emplace(sharded.parameters(), like);
        torch::optim::AdamW reference(plain->parameters(), like);
        for (int64_t step = 0; step < 3; ++step) {
          for (int64_t micro = 0; micro < 2; ++micro) {
            std::optional<Sharded::Accumulating> held;
            if (micro == 0) held.emplace(sharded.engine());
            net_s_loss(net, world, 2 * step + micro).backward();
            net_s_loss(plain, World{}, 2 * step + micro).backward();
          }
          for (const auto& item : plain->named_parameters()) {
            Tensor gradient = item.value().grad();
            if (item.key().ends_with("weight")) change(item.key(), gradient);
            item.value().mutable_grad() = gradient;
          }
          if (clip) {
            EXPECT_NEAR(sharded.clip_grad_norm(0.3), torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.3), 1e-6);
          }
          ours ? adamw->step() : (theirs->step(), true);
          ours ? adamw->zero_grad() : theirs->zero_grad();
          reference.step();
          reference.zero_grad();
          expect_same_parameters(sharded, plain);
        }
        EXPECT_EQ(calls, (std::map<std::string, int>{{"first.weight", 3}, {"middle.weight", 3}, {"last.weight", 3}}));
      }
  });
}

TEST(GradientHooks, OnReducedGradientsChangedInPlace) {
  expect_as_unsharded(
      [](const std::string& name, Tensor& gradient) { gradient.clamp_(-0.04, name == "last.weight" ? 0.01 : 1); }, false);
}

TEST(GradientHooks, OnReducedGradientsReplacedThenClipped) {
  expect_as_unsharded([](const std::string&, Tensor& gradient) { gradient = gradient * gradient.abs(); }, true);
}

TEST(GradientHooks, OnReducedGradientsOfScaledLossesAreNotScaled) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto options = net_s_options(placements);
    options.precision.working = torch::kHalf;
    options.loss_scale = LossScale::fixed(256);
    auto sharded = fully_shard(net, mesh_for(world, placements), options);
    AdamW optimizer(sharded, {});
    double largest = 0;
    sharded.on_reduced_gradient("first.weight", [&](const std::string&, Tensor& gradient) {
      if (gradient.numel() > 0) largest = gradient.abs().max().item<double>();
      gradient.mul_(0.5);
    });
    sharded.scale(net_s_loss(net, world, 0, torch::kHalf)).backward();
    net_s_loss(plain, World{}, 0).backward();
    const auto gradients = gradients_of(sharded);
    for (const auto& item : plain->named_parameters()) {
      const Tensor wanted = item.value().grad() * (item.key() == "first.weight" ? 0.5 : 1);
      EXPECT_TRUE(torch::allclose(gradients.at(item.key()).to(torch::kFloat), wanted, 1e-2, 2e-3)) << item.key();
    }
    EXPECT_LT(largest, 1);
    EXPECT_TRUE(optimizer.step());
  });
}

TEST(GradientHooks, OnReducedGradientsThatBecomeNotFinite) {
  on_ranks(2, [](const World& world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), net_s_options(zero3()));
    AdamW optimizer(sharded, {});
    sharded.on_reduced_gradient("middle.bias", [](const std::string&, Tensor& gradient) { gradient.mul_(NAN); });
    net_s_loss(net, world, 0).backward();
    expect_words(refusal<NonFiniteError>([&] { optimizer.step(); }), {"'middle.bias'", "not finite"});
    sharded.zero_grad();
    sharded.on_reduced_gradient("last.bias", [](const std::string&, Tensor& gradient) { gradient = torch::zeros({7}); });
    net_s_loss(net, world, 0).backward();
    expect_words(refusal<ConfigError>([&] { sharded.grad_norm(); }), {"'last.bias'", "[7]", "keep its shape"});
  });
}

TEST(GradientHooks, Refusals) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        const auto nothing = [](const std::string&, Tensor&) {};
        expect_words(refusal<ConfigError>([&] { sharded.on_reduced_gradient("head.*", nothing); }),
                     {"'head.*'", "no parameter"});
        expect_words(refusal<ConfigError>([&] { sharded.on_reduced_gradient("*", nullptr); }), {"'*'", "no function"});
        {
          AdamW fused(sharded, {.fused_reduction = true});
          expect_words(refusal<ConfigError>([&] { sharded.on_reduced_gradient("*", nothing); }), {"fused_reduction"});
        }
        sharded.on_reduced_gradient("*", nothing);
        expect_words(refusal<ConfigError>([&] { AdamW(sharded, {.fused_reduction = true}); }), {"fused_reduction"});
        AdamW optimizer(sharded, {});
        const auto backward = [&] { net_s_loss(net, world, 0).backward(); };
        backward();
        sharded.clip_grad_norm(1);
        optimizer.step();
        backward();
        sharded.clip_grad_norm(1);
        optimizer.zero_grad();
        backward();
        sharded.clip_grad_norm(1);
        const auto held = sharded.accumulating();
        expect_words(refusal<GuardError>(backward), {"on_reduced_gradient", "step 2", "after the last backward"});
      },
      {2});
}

}  // namespace
}  // namespace tessera::test
