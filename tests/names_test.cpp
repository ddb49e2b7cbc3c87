// What parameters and units are called by: tied parameters have several names, ignored ones are part of the model, and units
// that differ in type or layout answer to the one that was asked for.
#include <gtest/gtest.h>

#include <stdexcept>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;
using torch::nn::Linear;
using Named = std::vector<std::pair<std::string, Tensor>>;

/// A second owner of a parameter.
struct OwnerImpl : torch::nn::Module {
  explicit OwnerImpl(const Tensor& shared) : weight(register_parameter("weight", shared)) {}
  Tensor forward(const Tensor& x) { return torch::linear(x, weight); }
  Tensor weight;
};
TORCH_MODULE(Owner);

/// The output's weight is the input's, and there is a parameter of another type.
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(int64_t seed) {
    torch::manual_seed(seed);
    in = register_module("in", Linear(torch::nn::LinearOptions(4, 4).bias(false)));
    middle = register_module("middle", Linear(4, 4));
    out = register_module("out", Owner(in->weight));
    offset = register_parameter("offset", torch::randn({3}, torch::kDouble));
  }
  Tensor forward(const Tensor& x) { return out(torch::tanh(middle(torch::tanh(in(x))))).sum(1, true) + offset; }
  Linear in{nullptr}, middle{nullptr};
  Owner out{nullptr};
  Tensor offset;
};
TORCH_MODULE(Tied);

Named values_of(const Tied& net) {
  Named values;
  for (const auto& item : net->named_parameters()) values.emplace_back(item.key(), item.value().detach().clone());
  return values;
}

void expect_same(const Tied& net, const Tied& wanted) {
  const torch::NoGradGuard no_grad;
  const auto x = torch::ones({2, 4});
  EXPECT_TRUE(torch::equal(Tied(net)(x), Tied(wanted)(x)));
}

TEST(Names, TiedParametersComeUnderAnyOfTheirs) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        const Tied other(7);
        const Named all = values_of(other);
        ASSERT_EQ(std::count_if(all.begin(), all.end(), [](const auto& v) { return v.first == "out.weight"; }), 1);
        Named second;
        for (const auto& value : all)
          if (value.first != "in.weight") second.push_back(value);
        for (const auto& values : {all, second}) {
          Tied net(1);
          auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements});
          sharded.load_parameters(values);
          expect_same(net, other);
          const Tensor whole = other->in->weight.detach();
          EXPECT_TRUE(torch::equal(sharded.full_of("out.weight", sharded.local_of("out.weight", whole)), whole));
          Named contradicting = all;
          for (auto& [name, value] : contradicting)
            if (name == "out.weight") value = value + 1;
          expect_words(refusal<ConfigError>([&] { sharded.load_parameters(contradicting); }),
                       {"'in.weight'", "'out.weight'", "tied"});
          expect_same(net, other);
        }
      },
      {1, 2});
}

TEST(Names, IgnoredParametersAreLoadedAndCopied) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const bool there_too : {true, false}) {
          Tied net(1), other(7), copy(2);
          ShardOptions options{.placements = placements, .ignored = {"middle.*"}};
          auto sharded = fully_shard(net, mesh_for(world, placements), options);
          sharded.load_parameters(values_of(other));
          expect_same(net, other);
          if (!there_too) options.ignored = {"in.*"};
          auto sharded_copy = fully_shard(copy, mesh_for(world, placements), options);
          sharded.copy_to(sharded_copy);
          expect_same(copy, other);
        }
      },
      {1, 2});
}

TEST(Names, SplitUnitsAnswerToTheOneThatWasAskedFor) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        Tied net(1);
        ShardOptions options{.placements = placements,
                             .units = units_named({"middle"}),
                             .layouts = {{"middle.bias", block(2)}},
                             .kept = {"(root)", "middle"}};
        auto sharded = fully_shard(net, mesh_for(world, placements), options);
        ASSERT_EQ(sharded.engine().units().size(), 4u);
        for (const auto& unit : sharded.engine().units()) EXPECT_TRUE(unit->kept_after_forward()) << unit->name();
        {
          const auto scope = sharded.gathered("(root)");
          EXPECT_EQ(static_cast<const double*>(net->offset.const_data_ptr())[1], Tied(1)->offset[1].item<double>());
        }
        const auto write = [&] {
          const torch::NoGradGuard no_grad;
          net->middle->weight.add_(1);
          static_cast<float*>(net->middle->bias.unsafeGetTensorImpl()->mutable_data())[0] = 5;
        };
        EXPECT_THROW(sharded.edit("middle",
                                  [&] {
                                    write();
                                    throw std::runtime_error("not so");
                                  }),
                     std::runtime_error);
        expect_same(net, Tied(1));
        sharded.edit("middle", write);
        Tied wanted(1);
        {
          const torch::NoGradGuard no_grad;
          wanted->middle->weight.add_(1);
          wanted->middle->bias[0] = 5;
        }
        expect_same(net, wanted);
      },
      {1, 2});
}

TEST(Names, SmallParametersThatStayAnswerToTheirUnitToo) {
  on_ranks(2, [](World world) {
    Tied net(1);
    auto sharded = fully_shard(net, Mesh(world), {.units = units_named({"middle"}), .resident_below = 5});
    const auto scope = sharded.gathered("middle");
    EXPECT_EQ(static_cast<const float*>(net->middle->bias.const_data_ptr())[3], Tied(1)->middle->bias[3].item<float>());
    EXPECT_EQ(static_cast<const float*>(net->middle->weight.const_data_ptr())[3],
              Tied(1)->middle->weight[0][3].item<float>());
  });
}

}  // namespace
}  // namespace tessera::test
