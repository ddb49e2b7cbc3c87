// What models and training loops do with parameters, each in every placement against the unsharded run.
#include <gtest/gtest.h>
#include <unistd.h>

#include "tessera/base/text.h"
#include "tests/support/cases.h"
#include "tests/support/training_loop.h"

namespace tessera::test {
namespace {

using torch::Tensor;
using torch::nn::Linear;
using torch::nn::LinearOptions;

constexpr auto kDouble = torch::kDouble;

Tensor samples(int64_t step, int rank, int64_t columns = 6) {
  return input_rows(step, 4 * rank, 4 * rank + 4, columns, kDouble);
}
Tensor targets(int64_t step, int rank, int64_t columns = 3) {
  return target_rows(step, 4 * rank, 4 * rank + 4, columns, kDouble);
}
Tensor error(const Tensor& y, int64_t step, int rank) { return (y - targets(step, rank, y.size(-1))).pow(2).mean(); }

/// Linears a, b, c of 6×6 and a last of 6×3; a to c are units.
struct FourImpl : torch::nn::Module {
  FourImpl()
      : a(register_module("a", Linear(6, 6))),
        b(register_module("b", Linear(6, 6))),
        c(register_module("c", Linear(6, 6))),
        last(register_module("last", Linear(6, 3))) {
    to(kDouble);
    set_common_values(*this);
  }
  Tensor forward(Tensor x) {
    for (auto* each : {&a, &b, &c}) x = torch::tanh((*each)(x));
    return last(x);
  }
  Linear a{nullptr}, b{nullptr}, c{nullptr}, last{nullptr};
};
TORCH_MODULE(Four);

TrainingLoop<Four> four(const std::function<Tensor(Four&, int64_t, int)>& loss) {
  return {.build = [] { return Four(); }, .loss = loss, .options = {.units = named({"a", "b", "c"})}};
}

// ---- frozen ------------------------------------------------------------------------------------------------------------

void freeze_weights(Four& net, bool frozen) {
  for (auto& item : net->named_parameters())
    if (item.key().ends_with("weight")) item.value().set_requires_grad(!frozen);
}

TEST(CasesUses, OnlyBiasesAreTrainedFrozenBeforeOrAfterSharding) {
  for (const bool again : {false, true}) {
    auto loop = four([again](Four& net, int64_t step, int rank) {
      if (!again) return error(net(samples(step, rank)), step, rank);
      Tensor x = samples(step, rank);
      for (auto* each : {&net->a, &net->b, &net->c})
        x = recompute([each](const Tensor& h) { return torch::tanh((*each)(h)); }, x);
      return error(net->last(x), step, rank);
    });
    loop.steps = 5;
    auto frozen_before = loop;
    frozen_before.build = [] {
      Four net;
      freeze_weights(net, true);
      return net;
    };
    expect_as_unsharded(frozen_before);
    auto frozen_later = loop;
    frozen_later.loss = [loss = loop.loss](Four& net, int64_t step, int rank) {
      freeze_weights(net, step < 2);
      return loss(net, step, rank);
    };
    expect_as_unsharded(frozen_later);
  }
}

TEST(CasesUses, OnlyWhatIsTrainedIsReduced) {
  on_ranks(2, [](World world) {
    Four net;
    freeze_weights(net, true);
    auto sharded = fully_shard(net, Mesh(world), {.units = named({"a", "b", "c"})});
    AdamW optimizer(sharded, {});
    error(net(samples(0, world.rank.value)), 0, world.rank.value).backward();
    optimizer.step();
    const double elements = static_cast<double>(sharded.engine().traffic().reduced.value) / 8;
    EXPECT_EQ(mean_over_ranks(sharded, elements) * 2, 3 * 6 + 3) << "the biases, each taken from one peer";
  });
}

TEST(CasesUses, ALayerCalledManyTimesWithAndWithoutGradients) {
  expect_as_unsharded(four([](Four& net, int64_t step, int rank) {
    for (auto& parameter : net->b->parameters()) parameter.set_requires_grad(false);
    Tensor x = samples(step, rank), fixed;
    for (int i = 0; i < 3; ++i) x = torch::tanh(net->b(torch::tanh(net->a(x))));
    {
      const torch::NoGradGuard no_grad;
      fixed = net->a(torch::tanh(net->c(x)));
    }
    return error(net->last(net->c(net->a(x)) + fixed), step, rank);
  }));
}

// A low-rank adapter beside each frozen layer; the layers run again in backward.
struct AdapterImpl : torch::nn::Module {
  AdapterImpl()
      : base(register_module("base", Linear(6, 6))),
        down(register_module("down", Linear(LinearOptions(6, 2).bias(false)))),
        up(register_module("up", Linear(LinearOptions(2, 6).bias(false)))) {}
  Tensor forward(const Tensor& x) { return torch::tanh(base(x) + up(down(x))); }
  Linear base{nullptr}, down{nullptr}, up{nullptr};
};
TORCH_MODULE(Adapter);
struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl() : last(register_module("last", Linear(6, 3))) {
    for (int i = 0; i < 3; ++i) layers.push_back(register_module(text("layer", i), Adapter()));
    to(kDouble);
    set_common_values(*this);
    for (auto& layer : layers)
      for (auto& parameter : layer->base->parameters()) parameter.set_requires_grad(false);
    for (auto& parameter : last->parameters()) parameter.set_requires_grad(false);
  }
  std::vector<Adapter> layers;
  Linear last{nullptr};
};
TORCH_MODULE(Adapted);

TEST(CasesUses, AdaptersOfAFrozenModel) {
  for (const bool again : {false, true})
    expect_as_unsharded<Adapted>({.build = [] { return Adapted(); },
                                  .loss =
                                      [again](Adapted& net, int64_t step, int rank) {
                                        Tensor x = samples(step, rank);  // requires no gradient, nor does the first base
                                        for (auto& layer : net->layers) x = again ? recompute(layer, x) : layer(x);
                                        return error(net->last(x), step, rank);
                                      },
                                  .options = {.units = units_of<AdapterImpl>()}});
}

// ---- what takes part ---------------------------------------------------------------------------------------------------

TEST(CasesUses, AnOutputThatLeavesTheLoss) {
  auto loop = four([](Four& net, int64_t step, int rank) {
    const Tensor h = torch::tanh(net->a(samples(step, rank))), first = net->b(h), second = net->c(h);
    const Tensor loss = error(net->last(first), step, rank);
    return step < 2 ? loss + second.pow(2).mean() : loss;
  });
  loop.steps = 4;
  expect_as_unsharded(loop);
}

TEST(CasesUses, BranchesThatDifferByRankAndStep) {
  auto loop = four([](Four& net, int64_t step, int rank) {
    Linear* experts[] = {&net->a, &net->b, &net->c};
    Tensor x = samples(step, rank);
    if ((rank + step) % 4 != 3) x = torch::tanh((*experts[(rank + step) % 3])(x));
    if (step == 2) x = torch::tanh((*experts[rank % 2])(x));  // some twice
    return error(net->last(x), step, rank);
  });
  loop.steps = 5;
  expect_as_unsharded(loop, {1, 2, 3, 5});
}

TEST(CasesUses, AModuleThatIsNeverCalledAndAStepWithoutTheModel) {
  expect_as_unsharded(four([](Four& net, int64_t step, int rank) {
    if (step == 1) return samples(step, rank).requires_grad_(true).sum();
    return error(net->last(torch::tanh(net->a(samples(step, rank)))), step, rank);
  }));
}

// Nothing of the model is used on one rank in one step, as when its batch is empty: our AdamW's step takes part all the
// same.
TEST(CasesUses, ARankWithoutAnyGradient) {
  const auto loss = [](Four& net, int64_t step, int rank) {
    const Tensor x = samples(step, rank);
    return step == 1 && rank == 1 ? x.requires_grad_(true).sum() : error(net(x), step, rank);
  };
  for_every_placement(
      [&](const World& world, const Placements& placements) {
        Four net, plain;
        auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements, .units = named({"a", "c"})});
        AdamW ours(sharded, {.lr = 0.02, .eps = 1e-3});
        torch::optim::AdamW alone(plain->parameters(), torch::optim::AdamWOptions(0.02).eps(1e-3));
        for (int64_t step = 0; step < 4; ++step) {
          loss(net, step, world.rank.value).backward();
          for (int rank = 0; rank < world.size; ++rank) (loss(plain, step, rank) / world.size).backward();
          ours.step();
          ours.zero_grad();
          alone.step();
          alone.zero_grad();
        }
        expect_close(sharded.full_parameters(), parameters_of(*plain), "the parameter");
      },
      {2, 3});
}

// A unit of two modules, one of which runs in parts with a backward each, and one now and then.
TEST(CasesUses, PartOfAJoinedUnitRunsByItself) {
  auto loop = four([](Four& net, int64_t step, int rank) {
    const Tensor h = torch::tanh(net->a(samples(step, rank)));
    Tensor sum = torch::zeros({}, kDouble);
    for (const auto& part : h.chunk(2)) {
      const Tensor alone = part.detach().requires_grad_(true);
      if (rank % 2 == 0 || step > 0) sum = sum + torch::tanh(net->b(alone)).pow(2).mean();
    }
    if (step == 2) sum = sum + net->c(h).pow(2).mean();
    return sum + error(net->last(h), step, rank);
  });
  loop.options.joined = {"[bc]"};
  loop.steps = 4;
  expect_as_unsharded(loop);
}

// ---- backward ----------------------------------------------------------------------------------------------------------

TEST(CasesUses, InputsThatNeedGradients) {
  expect_as_unsharded(four([](Four& net, int64_t step, int rank) {
    const Tensor x = samples(step, rank).requires_grad_(true);
    const Tensor loss = error(net(x), step, rank);
    const Tensor slope = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return loss + (slope.norm() - 1).pow(2);
  }));
}

TEST(CasesUses, GradientsOfParametersThatAreAskedFor) {
  expect_as_unsharded(four([](Four& net, int64_t step, int rank) {
    const Tensor loss = error(net(samples(step, rank)), step, rank);
    const auto slopes = torch::autograd::grad({loss}, {net->a->weight, net->last->bias}, {}, true, true);
    return loss + 0.1 * (slopes[0].pow(2).sum() + slopes[1].pow(2).sum());
  }));
}

TEST(CasesUses, AGraphThatIsKeptForAnotherBackward) {
  expect_as_unsharded(four([](Four& net, int64_t step, int rank) {
    const Tensor y = net(samples(step, rank)), first = error(y, step, rank), second = y.pow(3).mean();
    (first * 0).backward({}, /*retain_graph=*/true);  // zeros to all
    return first + second;
  }));
}

TEST(CasesUses, ViewsOfAParameterSavedForBackward) {
  expect_as_unsharded(four([](Four& net, int64_t step, int rank) {
    const auto parts = net->a->weight.chunk(3);
    const Tensor x = samples(step, rank), q = torch::linear(x, parts[0]), k = torch::linear(x, parts[1]),
                 v = torch::linear(x, parts[2]);
    Tensor h = torch::cat({q * k, v * net->a->bias.slice(0, 0, 2), k}, 1);
    h = net->b(torch::tanh(net->c(h)));  // other units come in between
    return error(net->last(h * net->a->weight.t().diagonal()), step, rank);
  }));
}

TEST(CasesUses, ParametersAreReadBetweenForwardAndBackward) {
  expect_as_unsharded(four([](Four& net, int64_t step, int rank) {
    Tensor loss = error(net(samples(step, rank)), step, rank);
    double sum = 0;
    {
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : net->parameters()) sum += parameter.pow(2).sum().item<double>();
      net(samples(step + 1, rank));  // an evaluation
    }
    return loss * (1 + sum);
  }));
}

// ---- loops -------------------------------------------------------------------------------------------------------------

TEST(CasesUses, ForwardsOfAllMicroBatchesBeforeTheirBackwards) {
  expect_as_unsharded(four([](Four& net, int64_t step, int rank) {
    std::vector<Tensor> losses;
    for (int64_t micro = 0; micro < 3; ++micro) losses.push_back(error(net(samples(3 * step + micro, rank)), step, rank));
    return losses[2] + losses[0] + losses[1];
  }));
  // With a backward each, in another order than the forwards'.
  for_every_placement([](const World& world, const Placements& placements) {
    for (const bool ours : {false, true}) {
      Four net, plain;
      auto sharded =
          fully_shard(net, mesh_for(world, placements), {.placements = placements, .units = named({"a", "b", "c"})});
      std::optional<AdamW> optimizer;
      if (ours) optimizer.emplace(sharded, AdamWOptions{});
      std::vector<Tensor> losses;
      for (int64_t micro = 0; micro < 3; ++micro) losses.push_back(error(net(samples(micro, world.rank.value)), micro, 0));
      for (const size_t micro : {1U, 0U, 2U}) {
        std::optional<Sharded::Accumulating> held;
        if (micro != 2) held.emplace(sharded.engine());
        losses[micro].backward();
      }
      for (int rank = 0; rank < world.size; ++rank)
        for (int64_t micro = 0; micro < 3; ++micro) (error(plain(samples(micro, rank)), micro, 0) / world.size).backward();
      expect_close(sharded.full_gradients(), gradients_of(*plain), "the gradient");
      expect_all_sharded(sharded);
    }
  });
}

TEST(CasesUses, AnExceptionInForwardOnAllRanks) {
  for (const bool late : {false, true}) {
    auto loop = four([](Four& net, int64_t step, int rank) { return error(net(samples(step, rank)), step, rank); });
    loop.before = [late](Four& net, Sharded&, int64_t step) {
      if (step != 1) return;
      EXPECT_THROW(
          {
            const Tensor h = net->b(net->a(samples(0, 0)));
            if (late) net->last(net->c(h)).sum();
            throw std::runtime_error("a bad sample");
          },
          std::runtime_error);
    };
    expect_as_unsharded(loop);
  }
}

TEST(CasesUses, RanksThatAreLateNowAndThen) {
  auto loop = four([](Four& net, int64_t step, int rank) {
    const auto pause = [step, rank](int64_t place) {
      if ((step + rank + place) % 3 == 0) usleep(5000);
    };
    Tensor x = samples(step, rank);
    pause(0);
    x = torch::tanh(net->a(x));
    pause(1);
    x = torch::tanh(net->c(net->b(x)));
    if (x.requires_grad()) x.register_hook([pause](const Tensor&) { pause(2); });
    return error(net->last(x), step, rank);
  });
  loop.steps = 4;
  expect_as_unsharded(loop);
}

TEST(CasesUses, TwoModelsWithOneLoss) {
  for_every_placement([](const World& world, const Placements& placements) {
    Four first, second, plain_first, plain_second;
    auto one = fully_shard(first, mesh_for(world, placements), {.placements = placements, .units = named({"a", "b"})});
    auto other = fully_shard(second, mesh_for(world, placements), {.placements = placements, .units = named({"c"})});
    torch::optim::SGD optimizer_one(one.parameters(), 0.1), optimizer_other(other.parameters(), 0.1),
        plain_one(plain_first->parameters(), 0.1), plain_other(plain_second->parameters(), 0.1);
    const auto loss = [](Four& a, Four& b, int64_t step, int rank) {
      const Tensor x = samples(step, rank);
      return error(a(x), step, rank) + error(b(torch::cat({a(x), b(x)}, 1)), step, rank);
    };
    for (int64_t step = 0; step < 3; ++step) {
      loss(first, second, step, world.rank.value).backward();
      for (int rank = 0; rank < world.size; ++rank) (loss(plain_first, plain_second, step, rank) / world.size).backward();
      expect_close(one.full_gradients(), gradients_of(*plain_first), "the first's gradient");
      expect_close(other.full_gradients(), gradients_of(*plain_second), "the second's gradient");
      expect_all_sharded(one);
      expect_all_sharded(other);
      for (auto* each : {&optimizer_one, &optimizer_other, &plain_one, &plain_other}) {
        each->step();
        each->zero_grad();
      }
    }
    expect_close(one.full_parameters(), parameters_of(*plain_first), "the first's parameter");
    expect_close(other.full_parameters(), parameters_of(*plain_second), "the second's parameter");
  });
}

// A sharded part in a replicated whole, with a part that nobody manages.
TEST(CasesUses, PartsOfAModelWithPlacementsOfTheirOwn) {
  for_every_placement([](const World& world, const Placements& placements) {
    Four net, plain;
    for (auto* each : {&net, &plain})
      for (auto& parameter : (*each)->c->parameters()) parameter.set_requires_grad(false);
    auto inner = fully_shard(net->b, mesh_for(world, placements), {.placements = placements});
    auto outer = fully_shard(net, Mesh(world), {.placements = ddp(), .ignored = {"b.*", "c.*"}});
    EXPECT_EQ(inner.parameter_count() + outer.parameter_count(), 42 + 42 + 21);
    AdamW optimizer(inner, {.lr = 0.02, .eps = 1e-3}), optimizer_outer(outer, {.lr = 0.02, .eps = 1e-3});
    torch::optim::AdamW alone(plain->parameters(), torch::optim::AdamWOptions(0.02).eps(1e-3));
    for (int64_t step = 0; step < 3; ++step) {
      error(net(samples(step, world.rank.value)), step, world.rank.value).backward();
      for (int rank = 0; rank < world.size; ++rank) (error(plain(samples(step, rank)), step, rank) / world.size).backward();
      for (AdamW* each : {&optimizer, &optimizer_outer}) {
        each->step();
        each->zero_grad();
      }
      alone.step();
      alone.zero_grad();
    }
    std::map<std::string, Tensor> all;
    for (const auto& [name, value] : inner.full_parameters()) all["b." + name] = value;
    for (const auto& [name, value] : outer.full_parameters()) all[name] = value;
    NamedTensors wanted;
    for (const auto& [name, value] : parameters_of(*plain))
      if (!name.starts_with("c.")) wanted.emplace_back(name, value);
    expect_close(NamedTensors(all.begin(), all.end()), wanted, "the parameter");
  });
}

}  // namespace
}  // namespace tessera::test
