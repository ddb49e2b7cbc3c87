// Muon: its arithmetic against numbers computed elsewhere, and the sharded update against the unsharded one.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;

Tensor matrix(int t, int64_t rows, int64_t columns) {
  const Tensor k = torch::arange(rows * columns, torch::kDouble);
  return (0.3 * torch::sin(0.37 * k + 1.1 * t + 0.5)).view({rows, columns});
}

// The sums are those of torch.optim.Muon's formulas (PyTorch 2.13), evaluated in fp64 with numpy: three steps from the
// common values, lr 0.02.
TEST(Muon, IsTorchsFormula) {
  struct Expected {
    int64_t rows, columns;
    MuonOptions::AdjustLr adjust;
    bool nesterov;
    double sum, absolute;
  };
  for (const auto& expected :
       {Expected{5, 3, MuonOptions::AdjustLr::original, true, 0.06659045604787506, 3.186266165750867},
        Expected{5, 3, MuonOptions::AdjustLr::match_rms_adamw, false, 0.04440498685227115, 3.129890684477689},
        Expected{3, 5, MuonOptions::AdjustLr::original, true, 0.07149228822297066, 3.190957564448454},
        Expected{3, 5, MuonOptions::AdjustLr::match_rms_adamw, false, 0.05128128646129071, 3.1333837571882164}}) {
    for (const auto type : {torch::kDouble, torch::kBFloat16}) {
      Tensor values = matrix(0, expected.rows, expected.columns).requires_grad_(true);
      Muon muon({{"w", values}}, {.lr = 0.02, .nesterov = expected.nesterov, .adjust_lr = expected.adjust, .type = type});
      for (int step = 0; step < 3; ++step) {
        values.mutable_grad() = matrix(step + 1, expected.rows, expected.columns);
        muon.step();
        muon.zero_grad();
        EXPECT_FALSE(values.grad().defined());
      }
      const double tolerance = type == torch::kDouble ? 1e-12 : 0.03;  // bf16 has three digits
      EXPECT_NEAR(values.sum().item<double>(), expected.sum, tolerance);
      EXPECT_NEAR(values.abs().sum().item<double>(), expected.absolute, tolerance);
    }
  }
}

TEST(Muon, ShardedIsTheUnshardedUpdate) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    const MuonOptions options{.lr = 0.02, .type = torch::kFloat};
    const auto not_last = [](const std::string& name) { return name != "last.weight"; };
    auto shard_options = net_s_options(placements);
    shard_options.layouts = {{"*.weight", whole_parameters()}};
    auto sharded = fully_shard(net, mesh_for(world, placements), shard_options);
    Muon::Named named;
    for (const auto& item : plain->named_parameters()) named.emplace_back(item.key(), item.value());
    Muon muon(sharded, options, not_last), expected(named, options, not_last);
    EXPECT_EQ(expected.other_parameters().size(), 4U);  // three biases and the last weight
    torch::optim::SGD rest(muon.other_parameters(), torch::optim::SGDOptions(0.1)),
        expected_rest(expected.other_parameters(), torch::optim::SGDOptions(0.1));
    const World alone{};
    for (int64_t s = 0; s < 3; ++s) {
      net_s_loss(net, world, s).backward();
      net_s_loss(plain, alone, s).backward();
      muon.step();
      rest.step();
      expected.step();
      expected_rest.step();
      sharded.zero_grad();
      plain->zero_grad();
    }
    auto values = plain->named_parameters();
    for (const auto& [name, value] : sharded.full_parameters())
      EXPECT_TRUE(torch::allclose(value, values[name], 1e-4, 2e-6)) << name;
  });
}

TEST(Muon, RefusalsNameParameterAndOption) {
  on_ranks(2, [](World world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), {.layouts = {{"*", per_parameter()}}});
    expect_words(refusal<ConfigError>([&] { Muon muon(sharded); }), {"'first.weight'", "[5, 6]", "whole_parameters()"});
    expect_words(refusal<ConfigError>([&] { Muon muon(sharded, {.momentum = 1}); }), {"momentum", "[0, 1)", "1"});
    expect_words(refusal<ConfigError>([&] { Muon muon(sharded, {.iterations = 0}); }), {"iterations", "1 … 99"});
  });
}

}  // namespace
}  // namespace tessera::test
