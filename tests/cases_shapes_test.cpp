// Parameters of every shape that a model can have: scalars, one element, none, fewer rows than ranks, not contiguous, alone;
// in every placement and layout, on 1, 2, 3 and 5 ranks.
#include <gtest/gtest.h>

#include "tessera/base/text.h"
#include "tests/support/cases.h"
#include "tests/support/training_loop.h"

namespace tessera::test {
namespace {

using torch::Tensor;
using Shapes = std::vector<std::vector<int64_t>>;

/// Parameters "p0", "p1", … with values and samples that follow from their place.
struct HolderImpl : torch::nn::Module {
  explicit HolderImpl(const std::vector<Tensor>& values) {
    for (const auto& value : values) all.push_back(register_parameter(text("p", all.size()), value));
  }
  /// Σ (p · c)², where c depends on step and rank.
  Tensor loss(int64_t step, int rank) {
    Tensor sum = torch::zeros({}, torch::kDouble);
    for (const auto& p : all) {
      const auto k = torch::arange(p.numel(), torch::kDouble).view(p.sizes());
      sum = sum + (p * torch::cos(0.7 * k + 0.3 * step + 1.1 * rank)).pow(2).sum();
    }
    return sum;
  }
  std::vector<Tensor> all;
};
TORCH_MODULE(Holder);

Tensor values_of(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return torch::sin(0.37 * torch::arange(count, torch::kDouble) + 0.5).view(shape);
}

TrainingLoop<Holder> loop_of(const std::function<std::vector<Tensor>()>& values) {
  return {.build = [values] { return Holder(values()); },
          .loss = [](Holder& net, int64_t step, int rank) { return net->loss(step, rank); },
          .steps = 2};
}

TrainingLoop<Holder> loop_of(const Shapes& shapes) {
  return loop_of([shapes] {
    std::vector<Tensor> values;
    for (const auto& shape : shapes) values.push_back(values_of(shape));
    return values;
  });
}

/// In every placement and layout; both in one process, since most of the time goes into starting ranks.
void expect_in_every_layout(const std::vector<TrainingLoop<Holder>>& loops,
                            std::initializer_list<int> ranks = {1, 2, 3, 5}) {
  for_every_placement(
      [&](const World& world, const Placements& placements) {
        bool ours = false;  // by turns
        for (const auto& layout : {flat(), per_parameter(), per_parameter(-1), block(3), whole_parameters()})
          for (auto loop : loops) {
            SCOPED_TRACE(name_of(layout));
            loop.options.layouts = {{"*", layout}};
            train_as_unsharded(loop, world, placements, /*ours=*/ours = !ours);
          }
      },
      ranks);
}

TEST(CasesShapes, OneParameterAlone) {
  std::vector<TrainingLoop<Holder>> loops;
  for (const auto& shape : Shapes{{}, {1}, {2}, {3, 3}, {1, 5}, {5, 1}, {2, 3, 2, 2}})
    loops.push_back(loop_of(Shapes{shape}));
  expect_in_every_layout(loops);
}

TEST(CasesShapes, EmptyOnesAmongOthers) {
  expect_in_every_layout({loop_of(Shapes{{0}, {3}}), loop_of(Shapes{{4, 2}, {0, 3}, {}}), loop_of(Shapes{{2, 0, 4}, {1}})});
}

TEST(CasesShapes, AModelOfEmptyParameters) {
  expect_in_every_layout({loop_of(Shapes{{0}}), loop_of(Shapes{{0, 3}, {2, 0}})});
}

TEST(CasesShapes, ManyOfAllKinds) {
  expect_in_every_layout(
      {loop_of(Shapes{{}, {17, 3}, {1}, {3}, {0}, {5, 5}, {2, 3, 4}, {}, {8}, {3, 1}, {1, 3}, {64}, {63}, {65}})});
}

TEST(CasesShapes, NotContiguous) {
  const auto values = [] {
    return std::vector<Tensor>{
        values_of({3, 5}).t(), values_of({2, 3, 4, 5}).contiguous(torch::MemoryFormat::ChannelsLast),
        values_of({9})[4],                 // in the middle of other memory
        values_of({9}).slice(0, 1, 9, 2),  // with a stride
    };
  };
  expect_in_every_layout({loop_of([values] {
    std::vector<Tensor> leaves;
    for (const auto& value : values()) leaves.push_back(value.detach());
    return leaves;
  })});
}

// Memory that was freed full of NaN must not show through padding.
TEST(CasesShapes, ValuesAreThoseBeforeShardingWithAndWithoutPadding) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const int64_t size : {1, 16, 17, 63, 1000, 1024})
          for (const auto type : {torch::kDouble, torch::kBFloat16}) {
            { const auto poison = torch::full({1 << 16}, NAN); }
            const auto values = values_of({size}).to(type);
            Holder net(std::vector<Tensor>{values.clone(), values.clone().view({size, 1}), values[0].clone()});
            const auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements});
            const auto whole = sharded.full_parameters();
            EXPECT_TRUE(torch::equal(whole[0].second, values));
            EXPECT_TRUE(torch::equal(whole[1].second.flatten(), values));
            EXPECT_TRUE(torch::equal(whole[2].second, values[0]));
          }
      },
      {1, 2, 3, 5});
}

// The worked example: y = x·w of a 3×3 matrix, one step of SGD.
TEST(CasesShapes, ThreeRowsOnAnyNumberOfRanks) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        Holder net(std::vector<Tensor>{values_of({3, 3})});
        const auto before = values_of({3, 3}), x = torch::tensor({{1.0, 2.0, 3.0}}, torch::kDouble);
        auto sharded =
            fully_shard(net, mesh_for(world, placements), {.placements = placements, .layouts = {{"*", per_parameter()}}});
        torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
        const auto y = torch::mm(x, net->all[0]);
        y.sum().backward();
        optimizer.step();
        EXPECT_TRUE(torch::allclose(y, torch::mm(x, before)));
        EXPECT_TRUE(torch::allclose(sharded.full_parameters()[0].second, before - 0.1 * x.t()));
      },
      {1, 2, 3, 4, 5});
}

TEST(CasesShapes, AnEditedScalarAndAnEmptyParameterAreKept) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        Holder net(std::vector<Tensor>{values_of({}), values_of({0, 2}), values_of({3})});
        auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements});
        {
          const torch::NoGradGuard no_grad;
          for (auto& p : net->all) p.fill_(2);
        }
        sharded.release();
        const auto whole = sharded.full_parameters();
        EXPECT_EQ(whole[0].second.item<double>(), 2);
        EXPECT_EQ(whole[1].second.sizes(), (std::vector<int64_t>{0, 2}));
        EXPECT_EQ(whole[2].second.sum().item<double>(), 6);
      },
      {1, 2, 3});
}

// A dim that a parameter doesn't have: the last, or the first, that it has.
TEST(CasesShapes, AShardDimThatIsNotThere) {
  expect_in_every_layout({loop_of(Shapes{{4, 3}})}, {2});
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const int dim : {2, 7, -5}) {
          auto loop = loop_of(Shapes{{4, 3}, {5}, {}});
          loop.options.layouts = {{"*", per_parameter(dim)}};
          train_as_unsharded(loop, world, placements, false);
        }
      },
      {3});
}

}  // namespace
}  // namespace tessera::test
