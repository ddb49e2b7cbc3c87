// Other ways to reach a sharded model's parameters and state: edits in forward, copies, autocast, gradients of some
// parameters only; values that come from one rank; memory that does not grow.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/refusal.h"
#include "tests/support/training_loop.h"

namespace tessera::test {
namespace {

using torch::Tensor;
namespace nn = torch::nn;

Tensor loss_of(NetS& net, int64_t step, int rank, torch::Dtype type = torch::kFloat) {
  const int64_t begin = 4 * rank, end = begin + 4;
  return (net(input_rows(step, begin, end, 6, type)) - target_rows(step, begin, end, 3, type)).pow(2).mean();
}

TrainingLoop<NetS> net_s(const std::function<Tensor(NetS&, int64_t, int)>& loss) {
  return {.build = common_net, .loss = loss, .options = {.units = named({"first", "middle"})}};
}

TEST(CasesAccess, WeightsThatForwardLimits) {
  expect_as_unsharded(net_s([](NetS& net, int64_t step, int rank) {
    {
      const torch::NoGradGuard no_grad;
      net->middle->weight.clamp_(-0.2, 0.2);
      net->last->weight.renorm_(2, 0, 0.3);
    }
    return loss_of(net, step, rank);
  }));
}

TEST(CasesAccess, AWeightThatIsWrittenBeforeItsBackwardIsTorchsError) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    const auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    const auto loss = loss_of(net, 0, 0);
    {
      const torch::NoGradGuard no_grad;
      net->middle->weight.mul_(2);
    }
    expect_words(refusal<std::exception>([&] { loss.backward(); }), {"modified by an inplace operation"});
  });
}

TEST(CasesAccess, ACopyOfALayerIsAPlainLayer) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    const auto copy = std::dynamic_pointer_cast<nn::LinearImpl>(net->middle->clone());
    EXPECT_TRUE(torch::equal(copy->weight, plain->middle->weight));
    copy->forward(torch::ones({2, 5})).sum().backward();
    EXPECT_TRUE(copy->weight.grad().defined());
    {
      const torch::NoGradGuard no_grad;
      copy->weight.zero_();
    }
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);  // which the copy has not changed
  });
}

TEST(CasesAccess, EvaluationWithAndWithoutGradientsIsTheSame) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
    net->eval();
    const auto x = input_rows(0, 0, 8, 6), with = net(x).detach();
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(with, net(x)));
  });
}

TEST(CasesAccess, ConversionsThatChangeNothing) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    net->to(torch::kFloat);
    net->to(torch::kCPU);
    net->train();
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
  });
}

TEST(CasesAccess, ABackwardToSomeParametersOnly) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    loss_of(net, 0, world.rank.value).backward({}, std::nullopt, false, {{net->middle->weight, net->last->bias}});
    for (int rank = 0; rank < world.size; ++rank)
      (loss_of(plain, 0, rank) / world.size).backward({}, std::nullopt, false, {{plain->middle->weight, plain->last->bias}});
    expect_close(sharded.full_gradients(), gradients_of(*plain), "the gradient");
    expect_all_sharded(sharded);
  });
}

class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, torch::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

TEST(CasesAccess, Autocast) {
  const auto loop = net_s([](NetS& net, int64_t step, int rank) {
    const Autocast autocast;
    const Tensor y = net(input_rows(step, 4 * rank, 4 * rank + 4, 6));
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    return (y.to(torch::kFloat) - target_rows(step, 4 * rank, 4 * rank + 4, 3)).pow(2).mean();
  });
  expect_as_unsharded(loop, {1, 2, 4});  // dividing by 3 would round in bf16
}

// ---- what is said ------------------------------------------------------------------------------------------------------

std::string said(const std::function<void()>& action) {
  testing::internal::CaptureStderr();
  action();
  return testing::internal::GetCapturedStderr();
}

TEST(CasesAccess, GradientsThatAddUpAreSaid) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        enum class Drop { by_module, to_none, to_zero };
        for (const auto drop : {Drop::by_module, Drop::to_none, Drop::to_zero}) {
          auto net = common_net();
          auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
          torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
          const auto words = said([&] {
            for (int64_t step = 0; step < 3; ++step) {
              const auto loss = net_s_loss(net, world, step);
              if (drop == Drop::by_module)
                net->zero_grad();
              else
                optimizer.zero_grad(/*set_to_none=*/drop == Drop::to_none);
              loss.backward();
              optimizer.step();
            }
          });
          if (drop == Drop::by_module)
            expect_words(words, {"step 2", "'first.weight'", "zero_grad()", "of the module"});
          else
            EXPECT_EQ(words, "");
        }
      },
      {1});
}

TEST(CasesAccess, AViewMadeBeforeShardingIsSaid) {
  on_ranks(1, [](World world) {
    auto net = common_net();
    const auto view = net->middle->weight.t();
    expect_words(said([&] { fully_shard(net, Mesh(world)); }), {"'middle.weight'", "in forward"});
    auto other = common_net();
    EXPECT_EQ(said([&] { fully_shard(other, Mesh(world)); }), "");
  });
}

// ---- values of rank 0 ----------------------------------------------------------------------------------------------------

struct NormedImpl : nn::Module {
  NormedImpl() : norm(register_module("norm", nn::BatchNorm1d(6))), linear(register_module("linear", nn::Linear(6, 3))) {}
  nn::BatchNorm1d norm{nullptr};
  nn::Linear linear{nullptr};
};
TORCH_MODULE(Normed);

TEST(CasesAccess, ParametersAndBuffersOfRankZeroOnEveryRank) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        const auto seeded = [](int rank) {
          torch::manual_seed(static_cast<uint64_t>(rank));
          Normed net;
          net->norm->running_var.fill_(rank + 2);
          return net;
        };
        Normed net = seeded(world.rank.value), first = seeded(0);
        const auto sharded =
            fully_shard(net, mesh_for(world, placements), {.placements = placements, .initial = Initial::broadcast});
        for (const auto& [name, value] : sharded.full_parameters())
          EXPECT_TRUE(torch::equal(value, first->named_parameters()[name])) << name;
        for (const auto& item : first->named_buffers())
          EXPECT_TRUE(torch::equal(net->named_buffers()[item.key()], item.value())) << item.key();
      },
      {2, 3, 4});
}

// Fewer rows than ranks; the model is built without memory.
TEST(CasesAccess, DeferredLayersOfFewRowsTrain) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const auto working : {torch::kFloat, torch::kBFloat16}) {
          const auto build = [] {
            torch::manual_seed(1);
            return nn::Sequential(nn::Linear(3, 8), nn::Tanh(), nn::Linear(8, 3), nn::Tanh(), nn::Linear(3, 1));
          };
          const auto train = [&](nn::Sequential model) {
            auto sharded = fully_shard(model, mesh_for(world, placements),
                                       {.placements = placements,
                                        .units = units_of<nn::LinearImpl>(),
                                        .layouts = {{"*", per_parameter()}},
                                        .precision = {.working = working}});
            AdamW optimizer(sharded, {.lr = 0.01});
            for (int64_t step = 0; step < 3; ++step) {
              model->forward(input_rows(step, 2 * world.rank.value, 2 * world.rank.value + 2, 3, working)).sum().backward();
              optimizer.step();
              optimizer.zero_grad();
            }
            return sharded.full_parameters();
          };
          const auto wanted = train(build()), got = train(deferred(build));
          for (size_t i = 0; i < wanted.size(); ++i)
            EXPECT_TRUE(torch::equal(got[i].second, wanted[i].second)) << got[i].first;
        }
      },
      {2, 4});
}

}  // namespace
}  // namespace tessera::test
