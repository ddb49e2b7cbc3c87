// Types: what moments are kept in, gradients that add up in fp32, and casts at the borders of modules.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;

// ---- moments -----------------------------------------------------------------------------------------------------------

const AdamWOptions kNarrow{.lr = 0.01, .beta2 = 0.95, .eps = 1e-3, .moments = torch::kBFloat16};

/// torch's AdamW whose moments are rounded to bf16 after each step.
void step_and_round(torch::optim::AdamW& optimizer) {
  optimizer.step();
  for (auto& item : optimizer.state()) {
    auto& state = static_cast<torch::optim::AdamWParamState&>(*item.second);
    for (auto* moment : {&state.exp_avg(), &state.exp_avg_sq()}) moment->copy_(moment->to(torch::kBFloat16));
  }
}

TEST(Moments, InBf16AreTheUnshardedOnesRoundedAfterEachStep) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const auto type : {torch::kFloat, torch::kDouble})
          for (const bool fused : {false, true}) {
            auto net = common_net(), plain = common_net();
            net->to(type);
            plain->to(type);
            auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
            auto options = kNarrow;
            options.fused_reduction = fused;
            AdamW optimizer(sharded, options);
            torch::optim::AdamW expected(plain->parameters(),
                                         torch::optim::AdamWOptions(0.01).betas({0.9, 0.95}).eps(1e-3).weight_decay(0.01));
            for (int64_t s = 0; s < 5; ++s) {
              net_s_loss(net, world, s, type).backward();
              net_s_loss(plain, World{}, s, type).backward();
              optimizer.step();
              step_and_round(expected);
              optimizer.zero_grad();
              expected.zero_grad();
            }
            // A moment that lies near the middle between two of bf16's numbers may be rounded to either.
            const double tolerance = type == torch::kFloat ? 2e-5 : 1e-12;
            auto values = plain->named_parameters();
            for (const auto& [name, value] : sharded.full_parameters())
              EXPECT_TRUE(torch::allclose(value, values[name], tolerance, tolerance)) << name;
          }
      },
      {1, 2, 3, 4});
}

TEST(Moments, AreCountedInTheStateThatIsHeld) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const auto moments : {std::optional<torch::Dtype>(), std::optional(torch::kBFloat16)}) {
      auto net = common_net();
      auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
      const double without = sharded.state_bytes().optimizer, by_hand = sharded.state_bytes(moments ? 4 : 8).optimizer;
      AdamW optimizer(sharded, {.moments = moments});
      EXPECT_EQ(sharded.state_bytes().optimizer, by_hand);
      EXPECT_GT(by_hand, without);
    }
  });
}

TEST(Moments, OtherTypesAreRefused) {
  on_ranks(1, [](World world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), {});
    expect_words(refusal<ConfigError>([&] { AdamW(sharded, {.moments = torch::kHalf}); }), {"Half", "BFloat16", "(root)"});
    expect_words(refusal<ConfigError>([&] { AdamW(sharded, {.moments = torch::kDouble}); }), {"Double", "Float"});
    EXPECT_NO_THROW(AdamW(sharded, {.moments = torch::kFloat}));
  });
}

// ---- gradients of micro-batches ----------------------------------------------------------------------------------------

/// Gradients of many micro-batches, of which most are too small for a sum in 16 bits, add up in fp32.
TEST(GradientType, Fp32AddsUpWhatSixteenBitsWouldLose) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const auto working : {torch::kHalf, torch::kBFloat16}) {
      auto net = common_net(), plain = common_net();
      plain->to(working);
      auto options = net_s_options(placements);
      options.precision = {.working = working, .gradient = torch::kFloat};
      auto sharded = fully_shard(net, mesh_for(world, placements), options);
      std::map<std::string, Tensor> sums;
      for (int64_t s = 0; s < 9; ++s) {
        const double share = s == 0 ? 1 : 1.0 / 1024;
        {
          std::optional<Sharded::Accumulating> held;
          if (s < 8) held.emplace(sharded.engine());
          (net_s_loss(net, world, s, working) * share).backward();
        }
        for (int r = 0; r < world.size; ++r) {  // one rank's gradient after another: autograd would add them in 16 bits
          (net_s_loss(plain, World{.rank = Rank(r), .size = world.size}, s, working) * share).backward();
          for (auto& item : plain->named_parameters()) {
            auto& sum = sums[item.key()];
            const Tensor gradient = std::exchange(item.value().mutable_grad(), Tensor()).to(torch::kFloat) / world.size;
            sum = sum.defined() ? sum + gradient : gradient;
          }
        }
      }
      for (const auto& [name, gradient] : sharded.full_gradients()) {
        EXPECT_EQ(gradient.scalar_type(), torch::kFloat);
        EXPECT_TRUE(torch::allclose(gradient, sums[name], 1e-6, 1e-7)) << name;
      }
    }
  });
}

/// The same where sums over ranks are in 16 bits, under any optimizer.
TEST(GradientType, SixteenBitsOfManyMicroBatchesAddUpInFp32) {
  constexpr int64_t kBatches = 12;
  enum class Updates { torch, ours, fused };
  for_every_placement([](const World& world, const Placements& placements) {
    for (const auto working : {torch::kHalf, torch::kBFloat16})
      for (const auto updates : {Updates::torch, Updates::ours, Updates::fused}) {
        const double share = working == torch::kHalf ? 1.0 / 8192 : 1.0 / 512, tolerance = 6 * share;
        auto net = common_net(), plain = common_net();
        auto options = net_s_options(placements);
        options.precision.working = working;
        auto sharded = fully_shard(net, mesh_for(world, placements), options);
        std::optional<AdamW> optimizer;
        if (updates != Updates::torch)
          optimizer.emplace(
              sharded, AdamWOptions{.lr = 1, .eps = 1, .weight_decay = 0, .fused_reduction = updates == Updates::fused});
        std::map<std::string, Tensor> expected, values;
        for (auto& item : plain->named_parameters()) values[item.key()] = item.value().detach().clone();
        plain->to(working);
        net_s_loss(plain, World{}, 0, working).backward();
        for (auto& item : plain->named_parameters())
          expected[item.key()] = item.value().grad().to(torch::kFloat) * (1 + (kBatches - 1) * share);
        for (int64_t batch = 0; batch < kBatches; ++batch) {
          std::optional<Sharded::Accumulating> held;
          if (batch + 1 < kBatches) held.emplace(sharded.engine());
          (net_s_loss(net, world, 0, working).to(torch::kFloat) * (batch == 0 ? 1 : share)).backward();
        }
        if (optimizer) optimizer->step();
        for (const auto& [name, shard] : sharded.named_parameters()) {
          Tensor found = sharded.full_of(name, optimizer ? shard : shard.grad());
          if (optimizer) {  // of g the first update makes g / (|g| + eps)
            const Tensor change = values[name] - found;
            found = change / (1 - change.abs());
          }
          const auto wanted = expected[name];
          EXPECT_LE((found - wanted).norm().item<double>(), tolerance * wanted.norm().item<double>())
              << name << ", " << c10::toString(working) << ", " << static_cast<int>(updates);
        }
      }
  });
}

TEST(GradientType, NarrowerThanTheModel) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const auto& [working, narrow] : {std::pair(torch::kFloat, torch::kBFloat16), std::pair(torch::kFloat, torch::kHalf),
                                          std::pair(torch::kDouble, torch::kFloat)})
      for (const bool ours : {false, true})
        for (const int64_t batches : {1, 3}) {
          auto net = common_net(), plain = common_net();
          net->to(working);
          plain->to(working);
          auto options = net_s_options(placements);
          options.precision.gradient = narrow;
          auto sharded = fully_shard(net, mesh_for(world, placements), options);
          std::optional<AdamW> optimizer;
          if (ours) optimizer.emplace(sharded, AdamWOptions{});
          for (int64_t batch = 0; batch < batches; ++batch) {
            std::optional<Sharded::Accumulating> held;
            if (batch + 1 < batches) held.emplace(sharded.engine());
            net_s_loss(net, world, batch, working).backward();
            net_s_loss(plain, World{}, batch, working).backward();
          }
          const double tolerance = narrow == torch::kBFloat16 ? 1e-2 : narrow == torch::kHalf ? 2e-3 : 1e-6;
          auto parameters = plain->named_parameters();
          for (const auto& [name, gradient] : sharded.full_gradients()) {
            const Tensor wanted = parameters[name].grad();
            EXPECT_EQ(gradient.scalar_type(), narrow);
            EXPECT_LE((gradient.to(torch::kDouble) - wanted).norm().item<double>(), tolerance * wanted.norm().item<double>())
                << name << ", " << c10::toString(working) << " reduced to " << c10::toString(narrow) << ", " << batches;
          }
        }
  });
}

TEST(GradientType, GradientsThatAreNotDroppedAddUpInFp32) {
  for_every_placement([](const World& world, const Placements& placements) {
    std::vector<std::map<std::string, Tensor>> runs;
    for (const auto gradient : {torch::kFloat, torch::kBFloat16}) {
      auto net = common_net();
      auto options = net_s_options(placements);
      options.precision = {.working = torch::kBFloat16, .gradient = gradient};
      auto sharded = fully_shard(net, mesh_for(world, placements), options);
      AdamW optimizer(sharded, {.lr = 0.1, .eps = 1e-3});
      for (int64_t s = 0; s < 6; ++s) {
        net_s_loss(net, world, s, torch::kBFloat16).backward();
        optimizer.step();
        if (s % 3 == 2) optimizer.zero_grad();
      }
      runs.emplace_back();
      for (const auto& [name, value] : sharded.full_parameters()) runs.back()[name] = value;
    }
    for (const auto& [name, value] : runs[0])
      EXPECT_TRUE(torch::allclose(runs[1][name].to(torch::kFloat), value.to(torch::kFloat), 1e-2, 1e-2)) << name;
  });
}

// ---- borders -----------------------------------------------------------------------------------------------------------

/// What its parts see, for the test to look at.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  std::tuple<Tensor, std::optional<Tensor>> forward(const Tensor& x, const std::vector<Tensor>& more, int64_t times,
                                                    const Tensor& index) {
    seen = {x.scalar_type(), more[0].scalar_type(), index.scalar_type()};
    Tensor y = x + more[0];
    for (int64_t i = 0; i < times; ++i) y = torch::tanh(linear(y));
    return {y.index_select(0, index), more[0] * 2};
  }
  torch::nn::Linear linear{nullptr};
  std::vector<torch::Dtype> seen;
};
TORCH_MODULE(Block);

TEST(Forward, CastsInputsAndOutputsAsThePrecisionSays) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const auto working : {torch::kBFloat16, torch::kHalf}) {
      Block net(6), plain(6);
      set_common_values(*net);
      set_common_values(*plain);
      auto sharded = fully_shard(net, mesh_for(world, placements),
                                 {.placements = placements, .precision = {.working = working, .output = torch::kFloat}});
      plain->to(working);
      Tensor x = input_rows(0, 0, 8, 6).requires_grad_(true), same = input_rows(0, 0, 8, 6).requires_grad_(true);
      const Tensor more = input_rows(1, 0, 8, 6), index = torch::tensor({1, 0, 5});
      const auto [y, twice] = tessera::forward(net, x, std::vector{more}, int64_t{2}, index);
      EXPECT_EQ(net->seen, (std::vector<torch::Dtype>{working, working, torch::kLong}));
      const auto [wanted, wanted_twice] = plain->forward(same.to(working), {more.to(working)}, 2, index);
      EXPECT_EQ(y.scalar_type(), torch::kFloat);
      EXPECT_TRUE(torch::equal(y, wanted.to(torch::kFloat)));
      EXPECT_TRUE(torch::equal(*twice, wanted_twice->to(torch::kFloat)));
      y.pow(2).sum().backward();
      wanted.to(torch::kFloat).pow(2).sum().backward();
      EXPECT_EQ(x.grad().scalar_type(), torch::kFloat);
      EXPECT_TRUE(torch::equal(x.grad(), same.grad()));
      auto gradients = gradients_of(sharded);
      for (const auto& item : plain->named_parameters())
        EXPECT_TRUE(torch::equal(gradients[item.key()], item.value().grad())) << item.key();
    }
  });
}

/// A unit inside a model, and training as the unsharded model with the same casts.
struct TwoImpl : torch::nn::Module {
  TwoImpl() : first(register_module("first", NetS())), last(register_module("last", torch::nn::Linear(3, 3))) {}
  Tensor forward(const Tensor& x) { return last(tessera::forward(first, x).to(last->weight.scalar_type())); }
  NetS first{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Two);

TEST(Forward, AUnitInsideAModel) {
  for_every_placement([](const World& world, const Placements& placements) {
    Two net, plain;
    set_common_values(*net);
    set_common_values(*plain);
    auto sharded = fully_shard(net, mesh_for(world, placements),
                               {.placements = placements,
                                .units = named({"first"}),
                                .precision = {.working = torch::kBFloat16, .output = torch::kFloat}});
    plain->to(torch::kBFloat16);
    AdamW optimizer(sharded, {.lr = 0.01});
    const Tensor x = input_rows(0, 0, 8, 6), y = target_rows(0, 0, 8, 3);
    const Tensor loss = (tessera::forward(net, x) - y).pow(2).mean();
    EXPECT_EQ(loss.scalar_type(), torch::kFloat);
    // `plain` is not sharded, so the casts are by hand there.
    const Tensor inner = plain->first->forward(x.to(torch::kBFloat16)).to(torch::kFloat);
    const Tensor wanted = (plain->last(inner.to(torch::kBFloat16)).to(torch::kFloat) - y).pow(2).mean();
    EXPECT_EQ(loss.item<float>(), wanted.item<float>());
    loss.backward();
    EXPECT_TRUE(optimizer.step());
  });
}

/// libtorch's own casts at operators, on the CPU, in bf16.
class Autocast {
 public:
  Autocast() {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, torch::kBFloat16);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  }
};

/// An unmodified model under autocast, fp32 inputs and parameters of either type: the unsharded run under autocast.
TEST(Forward, UnderAutocastIsTheUnshardedRunUnderIt) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const auto working : {torch::kFloat, torch::kBFloat16}) {
          auto net = common_net(), plain = common_net();
          auto options = net_s_options(placements);
          options.precision.working = working;
          auto sharded = fully_shard(net, mesh_for(world, placements), options);
          plain->to(working);
          torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
          const auto loss_of = [&](NetS& of) {
            const Autocast scope;
            return torch::mse_loss(of(input_rows(0, 0, 8, 6)), target_rows(0, 0, 8, 3).to(torch::kBFloat16));
          };
          const Tensor loss = loss_of(net), wanted = loss_of(plain);
          EXPECT_EQ(loss.item<float>(), wanted.item<float>());
          loss.backward();
          wanted.backward();
          auto gradients = gradients_of(sharded);
          for (const auto& item : plain->named_parameters())
            EXPECT_TRUE(torch::equal(gradients[item.key()], item.value().grad())) << item.key();
          EXPECT_TRUE(sharded.step(optimizer));
          sharded.zero_grad();
          EXPECT_NE(loss_of(net).item<float>(), loss.item<float>());  // no cast of the old parameters is used again
        }
      },
      {1, 2, 4});
}

TEST(Forward, WithoutCastsIsAPlainCall) {
  on_ranks(1, [](World world) {
    Block plain(6), sharded_net(6), open(6);
    const Tensor x = input_rows(0, 0, 8, 6), index = torch::tensor({1});
    tessera::forward(plain, x, std::vector{x}, int64_t{1}, index);
    EXPECT_EQ(plain->seen[0], torch::kFloat);
    const auto sharded = fully_shard(sharded_net, Mesh(world), {});
    tessera::forward(*sharded_net, x, std::vector{x}, int64_t{1}, index);
    EXPECT_EQ(sharded_net->seen[0], torch::kFloat);
    const auto as_is = fully_shard(open, Mesh(world), {.precision = {.working = torch::kBFloat16, .cast_inputs = false}});
    EXPECT_THROW(tessera::forward(open, x, std::vector{x}, int64_t{1}, index), c10::Error);
    EXPECT_EQ(open->seen[0], torch::kFloat);
  });
}

}  // namespace
}  // namespace tessera::test
