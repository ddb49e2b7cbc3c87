// Ranks that do not shard the same thing: the same error on all of them, naming the parameter and both sides.
#include "tessera/engine/agreement.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/tessera.h"
#include "tests/support/net_s.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"
#include "tests/support/sharded_helpers.h"

namespace tessera::test {
namespace {

using torch::nn::Linear;
using torch::nn::LinearOptions;

/// Modules with the names, in order, that a test gives it; all of the same values on all ranks.
struct NamedModulesImpl : torch::nn::Module {
  void add(const std::string& name, const std::shared_ptr<torch::nn::Module>& module) { register_module(name, module); }
};
TORCH_MODULE(NamedModules);

NamedModules two_linears(const char* first = "a", const char* second = "b", int64_t outputs = 4) {
  NamedModules net;
  net->add(first, Linear(4, 4).ptr());
  net->add(second, Linear(4, outputs).ptr());
  set_common_values(*net);
  return net;
}

/// What a rank shards, and how.
struct Given {
  NamedModules net = two_linears();
  ShardOptions options = {};
};

// All of three ranks shard; the last one's is changed by `change`. All must hear the same `words`.
void expect_disagreement(const std::function<void(Given&)>& change, const std::vector<std::string>& words) {
  on_ranks(3, [&](World world) {
    Given given;
    if (world.rank.value == 2) change(given);
    const std::string said = refusal<AgreementError>([&] { fully_shard(given.net, Mesh(world), given.options); });
    expect_words(said, words);
    expect_words(said, {"rank 0 has", "rank 2 has"});
  });
}

TEST(Agreement, EqualModelsAgree) {
  on_ranks(3, [](World world) {
    Given given;
    EXPECT_NO_THROW(fully_shard(given.net, Mesh(world), given.options));
  });
}

TEST(Agreement, Names) {
  expect_disagreement([](Given& given) { given.net = two_linears("a", "renamed"); },
                      {"'b.weight'", "'renamed.weight'", "same model"});
}

TEST(Agreement, Order) {
  expect_disagreement([](Given& given) { given.net = two_linears("b", "a"); }, {"'a.weight'", "'b.weight'", "number 0"});
}

TEST(Agreement, Shapes) {
  expect_disagreement([](Given& given) { given.net = two_linears("a", "b", 5); },
                      {"the shape", "'b.weight'", "[4, 4]", "[5, 4]"});
}

TEST(Agreement, ShapesOfAsManyElements) {
  expect_disagreement(
      [](Given& given) {
        given.net = NamedModules();
        given.net->add("a", Linear(LinearOptions(2, 8)).ptr());
        given.net->add("b", Linear(4, 4).ptr());
      },
      {"the shape", "'a.weight'", "[4, 4]", "[8, 2]"});
}

TEST(Agreement, TypeOfAll) {
  expect_disagreement([](Given& given) { given.net->to(torch::kDouble); }, {"the type", "'a.weight'", "Float", "Double"});
}

TEST(Agreement, TypeOfOne) {
  expect_disagreement([](Given& given) { given.net->named_children()["b"]->to(torch::kBFloat16); }, {"'b.weight'"});
}

TEST(Agreement, FrozenOnOneRank) {
  expect_disagreement([](Given& given) { given.net->named_parameters()["b.bias"].set_requires_grad(false); },
                      {"requires_grad", "'b.bias'", "true", "false", "freeze"});
}

TEST(Agreement, OneInitialValue) {
  expect_disagreement(
      [](Given& given) {
        const torch::NoGradGuard no_grad;
        given.net->named_parameters()["b.weight"][3][2] += 1e-6;
      },
      {"the initial values", "'b.weight'", "hash", "Initial::broadcast"});
}

TEST(Agreement, AnInitialValueThatIsNotANumber) {
  expect_disagreement(
      [](Given& given) {
        const torch::NoGradGuard no_grad;
        given.net->named_parameters()["a.bias"][0] = NAN;
      },
      {"the initial values", "'a.bias'"});
}

TEST(Agreement, AnAdditionalParameterAtTheEnd) {
  expect_disagreement([](Given& given) { given.net->add("extra", Linear(4, 4).ptr()); },
                      {"number of parameters", "4", "6", "'extra.weight'"});
}

TEST(Agreement, AMissingParameterAtTheEnd) {
  expect_disagreement(
      [](Given& given) {
        NamedModules shorter;
        shorter->add("a", Linear(4, 4).ptr());
        set_common_values(*shorter);
        given.net = shorter;
      },
      {"number of parameters", "4", "2", "'b.weight'"});
}

TEST(Agreement, AnAdditionalParameterInBetween) {
  expect_disagreement(
      [](Given& given) {
        NamedModules longer;
        longer->add("a", Linear(4, 4).ptr());
        longer->add("extra", Linear(4, 4).ptr());
        longer->add("b", Linear(4, 4).ptr());
        set_common_values(*longer);
        given.net = longer;
      },
      {"'b.weight'", "'extra.weight'"});
}

TEST(Agreement, Units) {
  expect_disagreement(
      [](Given& given) {
        given.options.units = [](const std::string& name, const torch::nn::Module&) { return name == "b"; };
      },
      {"'b.weight' in unit '(root)'", "'b.weight' in unit 'b'"});
}

TEST(Agreement, Placement) {
  expect_disagreement([](Given& given) { given.options.placements = zero2(); },
                      {"how the model is to be sharded", "zero3", "zero2", "same options"});
}

TEST(Agreement, Precision) {
  expect_disagreement([](Given& given) { given.options.precision.working = torch::kBFloat16; },
                      {"working type", "BFloat16", "as is"});
  expect_disagreement([](Given& given) { given.options.precision.gradient = torch::kDouble; },
                      {"gradient type", "Double", "as is"});
}

TEST(Agreement, WhereValuesComeFrom) {
  expect_disagreement([](Given& given) { given.options.initial = Initial::broadcast; },
                      {"values verified", "values broadcast"});
}

TEST(Agreement, WhatToDoWithNonFiniteGradients) {
  expect_disagreement([](Given& given) { given.options.non_finite = NonFinite::skip; }, {"stop", "skip"});
  expect_disagreement([](Given& given) { given.options.loss_scale = LossScale::fixed(2); },
                      {"loss scale", "none", "fixed 2"});
  expect_disagreement([](Given& given) { given.options.precision.output = torch::kFloat; }, {"type of outputs", "Float"});
}

TEST(Agreement, RanksCanShardAfterADisagreement) {
  on_ranks(2, [](World world) {
    auto net = two_linears("a", world.rank.value == 0 ? "b" : "c");
    refusal<AgreementError>([&] { fully_shard(net, Mesh(world)); });
    auto agreed = two_linears();
    auto sharded = fully_shard(agreed, Mesh(world));
    agreed->named_parameters()["a.weight"].sum().backward();
    EXPECT_TRUE(torch::equal(gradients_of(sharded)["a.weight"], torch::ones({4, 4})));
  });
}

TEST(Agreement, BroadcastTakesRank0sValues) {
  on_ranks(3, [](World world) {
    torch::manual_seed(static_cast<uint64_t>(world.rank.value));
    NamedModules net;
    // Larger than what is sent at once (8 MiB), not contiguous, of another type, without elements, of one element.
    struct Odd : torch::nn::Module {
      Odd() {
        register_parameter("large", torch::randn({2050, 1100}));
        register_parameter("turned", torch::randn({7, 5}).t());
        register_parameter("doubles", torch::randn({3}, torch::kDouble));
        register_parameter("none", torch::randn({0, 4}));
        register_parameter("one", torch::randn({}));
        register_parameter("frozen", torch::randn({5}), false);
      }
    };
    net->add("odd", std::make_shared<Odd>());
    torch::manual_seed(0);
    const Odd first;
    auto sharded = fully_shard(net, Mesh(world), {.initial = Initial::broadcast});
    const auto expected = first.named_parameters();
    const auto whole = sharded.full_parameters();
    EXPECT_EQ(whole.size(), 6U);
    for (const auto& [name, value] : whole) EXPECT_TRUE(torch::equal(value, expected[name.substr(4)])) << name;
  });
}

}  // namespace
}  // namespace tessera::test
