// Optimizer state and gradients read and written by name, averages of parameters, copies of sharded models.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;
using torch::optim::AdamWParamState;

NetS double_net() {
  auto net = common_net();
  net->to(torch::kDouble);
  return net;
}

Sharded shard(NetS& net, const World& world, const Placements& placements, const LayoutKind& layout = per_parameter(1)) {
  auto options = net_s_options(placements);
  options.layouts = {{"*.weight", layout}};
  return fully_shard(net, mesh_for(world, placements), options);
}

Tensor loss_of(NetS& net, const World& world, int64_t s) { return net_s_loss(net, world, s, torch::kDouble); }

double distance(const Tensor& a, const Tensor& b) { return (a - b).abs().max().item<double>(); }

void expect_same_parameters(const Sharded& sharded, const NetS& plain) {
  auto wanted = plain->named_parameters();
  for (const auto& [name, value] : sharded.full_parameters()) EXPECT_LE(distance(value, wanted[name]), 1e-12) << name;
}

torch::optim::AdamWOptions torchs_options() { return torch::optim::AdamWOptions(0.01).eps(1e-3).weight_decay(0.1); }
const AdamWOptions kOurs{.lr = 0.01, .eps = 1e-3, .weight_decay = 0.1};

// ---- optimizer state ---------------------------------------------------------------------------------------------------

/// The full state is that of the unsharded optimizer, for ours and torch's.
TEST(OptimizerState, FullIsTheUnshardedOptimizers) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const bool ours : {true, false}) {
      auto net = double_net(), plain = double_net();
      net->last->weight.set_requires_grad(false);
      plain->last->weight.set_requires_grad(false);
      auto sharded = shard(net, world, placements);
      std::optional<AdamW> fused;
      std::optional<torch::optim::AdamW> other;
      ours ? void(fused.emplace(sharded, kOurs)) : void(other.emplace(sharded.parameters(), torchs_options()));
      torch::optim::AdamW expected(plain->parameters(), torchs_options());
      for (int64_t s = 0; s < 3; ++s) {
        loss_of(net, world, s).backward();
        loss_of(plain, World{}, s).backward();
        ours ? void(fused->step()) : void(other->step());
        expected.step();
        sharded.zero_grad();
        plain->zero_grad();
      }
      const auto full = ours ? full_state(sharded, *fused) : full_state(sharded, *other);
      const auto local = ours ? local_state(sharded, *fused) : local_state(sharded, *other);
      EXPECT_FALSE(full.contains("last.weight"));  // never updated
      for (const auto& item : plain->named_parameters()) {
        if (!item.value().requires_grad()) continue;
        const auto& state = static_cast<AdamWParamState&>(*expected.state()[item.value().unsafeGetTensorImpl()]);
        ASSERT_TRUE(full.contains(item.key())) << item.key();
        const auto& mine = full.at(item.key());
        EXPECT_EQ(mine.step, 3);
        EXPECT_LE(distance(mine.tensors.at("exp_avg"), state.exp_avg()), 1e-12) << item.key();
        EXPECT_LE(distance(mine.tensors.at("exp_avg_sq"), state.exp_avg_sq()), 1e-12) << item.key();
        const Tensor part = sharded.local_of(item.key(), state.exp_avg());
        if (part.numel() > 0) {
          EXPECT_LE(distance(local.at(item.key()).tensors.at("exp_avg"), part), 1e-12) << item.key();
        }
      }
    }
  });
}

/// A run that goes on elsewhere (another placement, layout, kind of AdamW) from the full state is the unbroken run.
TEST(OptimizerState, GoesOnInAnotherPlacementAndOptimizer) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto plain = double_net();
        torch::optim::AdamW expected(plain->parameters(), torchs_options());
        for (int64_t s = 0; s < 5; ++s) {
          loss_of(plain, World{}, s).backward();
          expected.step();
          plain->zero_grad();
        }
        for (const auto& to : every_placement())
          for (const bool from_ours : {true, false}) {
            std::vector<std::pair<std::string, Tensor>> values;
            OptimizerState state;
            const auto train = [&](NetS& net, Sharded& sharded, auto& optimizer, int64_t begin, int64_t end) {
              for (int64_t s = begin; s < end; ++s) {
                loss_of(net, world, s).backward();
                optimizer.step();
                sharded.zero_grad();
              }
            };
            {
              auto net = double_net();
              auto sharded = shard(net, world, placements);
              AdamW ours(sharded, kOurs);
              if (from_ours) {
                train(net, sharded, ours, 0, 2);
                state = full_state(sharded, ours);
              }
              values = sharded.full_parameters();
            }
            if (!from_ours) {
              auto net = double_net();
              auto sharded = shard(net, world, placements);
              torch::optim::AdamW theirs(sharded.parameters(), torchs_options());
              train(net, sharded, theirs, 0, 2);
              state = full_state(sharded, theirs);
              values = sharded.full_parameters();
            }
            torch::manual_seed(1);
            NetS net;
            net->to(torch::kDouble);
            auto sharded = shard(net, world, to, from_ours ? block(7) : flat());
            sharded.load_parameters(values);
            if (from_ours) {
              torch::optim::AdamW theirs(sharded.parameters(), torchs_options());
              load_full_state(sharded, theirs, state);
              train(net, sharded, theirs, 2, 5);
            } else {
              AdamW ours(sharded, kOurs);
              load_full_state(sharded, ours, state);
              train(net, sharded, ours, 2, 5);
            }
            expect_same_parameters(sharded, plain);
          }
      },
      {1, 2, 4});
}

template <class Optimizer, class Options>
void expect_goes_on_from_local_state(const World& world, const Placements& placements, const Options& options) {
  auto net = double_net(), copy = double_net();
  auto sharded = shard(net, world, placements), copied = shard(copy, world, placements);
  Optimizer optimizer(sharded.parameters(), options), other(copied.parameters(), options);
  const auto train = [&](NetS& of, Sharded& model, Optimizer& by, int64_t s) {
    loss_of(of, world, s).backward();
    by.step();
    model.zero_grad();
  };
  for (int64_t s = 0; s < 2; ++s) train(net, sharded, optimizer, s);
  std::vector<std::pair<std::string, Tensor>> parts;
  for (const auto& [name, shard] : sharded.named_parameters()) parts.emplace_back(name, shard.detach().clone());
  copied.load_local_parameters(parts);
  load_local_state(copied, other, local_state(sharded, optimizer));
  for (int64_t s = 2; s < 4; ++s) {
    train(net, sharded, optimizer, s);
    train(copy, copied, other, s);
  }
  const auto wanted = sharded.full_parameters(), got = copied.full_parameters();
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(torch::equal(wanted[i].second, got[i].second)) << wanted[i].first;
}

TEST(OptimizerState, LocalOfEveryKindThatIsKnown) {
  for_every_placement([](const World& world, const Placements& placements) {
    using namespace torch::optim;
    expect_goes_on_from_local_state<SGD>(world, placements, SGDOptions(0.05).momentum(0.9));
    expect_goes_on_from_local_state<Adam>(world, placements, AdamOptions(0.01).amsgrad(true));
    expect_goes_on_from_local_state<torch::optim::AdamW>(world, placements, torchs_options());
    expect_goes_on_from_local_state<RMSprop>(world, placements, RMSpropOptions(0.01).momentum(0.5).centered(true));
    expect_goes_on_from_local_state<Adagrad>(world, placements, AdagradOptions(0.01));
  });
}

TEST(OptimizerState, RefusalsNameTheParameterAndChangeNothing) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = double_net();
    auto sharded = shard(net, world, placements);
    AdamW optimizer(sharded, kOurs);
    loss_of(net, world, 0).backward();
    optimizer.step();
    sharded.zero_grad();
    const auto state = full_state(sharded, optimizer);
    const auto refused = [&](const std::function<void(OptimizerState&)>& spoil) {
      auto spoilt = state;
      for (auto& item : spoilt)
        for (auto& [key, tensor] : item.second.tensors) tensor = torch::zeros_like(tensor);
      spoil(spoilt);
      return refusal<ConfigError>([&] { load_full_state(sharded, optimizer, spoilt); });
    };
    expect_words(refused([](auto& s) { s["first.wait"] = {}; }), {"'first.wait'"});
    expect_words(refused([](auto& s) { s["last.bias"].tensors["exp_avg"] = torch::zeros({4}); }),
                 {"'last.bias'", "[3]", "[4]"});
    expect_words(refused([](auto& s) { s["last.bias"].tensors.erase("exp_avg_sq"); }), {"'last.bias'", "'exp_avg_sq'"});
    expect_words(refused([](auto& s) { s["last.bias"].tensors["sum"] = torch::zeros({3}); }), {"'last.bias'", "'sum'"});
    const auto after = full_state(sharded, optimizer);
    for (const auto& [name, kept] : state)
      EXPECT_TRUE(torch::equal(kept.tensors.at("exp_avg"), after.at(name).tensors.at("exp_avg"))) << name;
  });
  on_ranks(1, [](World world) {
    auto net = double_net();
    auto sharded = shard(net, world, zero3());
    torch::optim::LBFGS lbfgs(sharded.parameters(), torch::optim::LBFGSOptions());
    expect_words(refusal<ConfigError>([&] { full_state(sharded, lbfgs); }), {"not known", "full_of"});
    torch::optim::SGD partial({sharded.parameters()[0]}, torch::optim::SGDOptions(0.1));
    expect_words(refusal<ConfigError>([&] {
                   load_full_state(sharded, partial, {{"last.bias", {}}});
                 }),
                 {"'last.bias'", "not among"});
    auto other_net = double_net();
    auto other = shard(other_net, world, zero3());
    AdamW others(other, kOurs);
    expect_words(refusal<ConfigError>([&] { full_state(sharded, others); }), {"another sharded model"});
  });
}

TEST(OptimizerState, MuonsGoesOnElsewhere) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const auto& to : every_placement())
      for (const bool by_part : {false, true}) {
        auto net = double_net(), other_net = double_net();
        const auto not_last = [](const std::string& name) { return name != "last.weight"; };
        const MuonOptions options{.lr = 0.02, .type = torch::kDouble};
        auto sharded = shard(net, world, placements, whole_parameters());
        auto other = shard(other_net, world, by_part ? placements : to, whole_parameters());
        Muon muon(sharded, options, not_last), others(other, options, not_last);
        EXPECT_EQ(others.names(), (std::vector<std::string>{"first.weight", "middle.weight"}));
        const auto train = [&](NetS& of, Sharded& model, Muon& by, int64_t s) {
          loss_of(of, world, s).backward();
          EXPECT_TRUE(model.step(by));
          model.zero_grad();
        };
        for (int64_t s = 0; s < 2; ++s) train(net, sharded, muon, s);
        other.load_parameters(sharded.full_parameters());
        if (by_part)
          load_local_state(other, others, local_state(sharded, muon));
        else
          load_full_state(other, others, full_state(sharded, muon));
        train(net, sharded, muon, 2);
        train(other_net, other, others, 2);
        std::map<std::string, Tensor> wanted;
        for (const auto& [name, value] : sharded.full_parameters()) wanted[name] = value;
        for (const auto& [name, value] : other.full_parameters()) EXPECT_LE(distance(value, wanted[name]), 1e-12) << name;
        expect_words(refusal<ConfigError>([&] {
                       load_full_state(other, others, {{"last.weight", {}}});
                     }),
                     {"'last.weight'", "Muon's"});
      }
  });
}

TEST(OptimizerState, NarrowMomentsKeepTheirType) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), copy = common_net();
    auto options = kOurs;
    options.moments = torch::kBFloat16;
    auto sharded = shard(net, world, placements), copied = shard(copy, world, placements, flat());
    AdamW optimizer(sharded, options), other(copied, options);
    net_s_loss(net, world, 0).backward();
    optimizer.step();
    const auto state = full_state(sharded, optimizer);
    load_full_state(copied, other, state);
    for (const auto& [name, kept] : full_state(copied, other)) {
      EXPECT_EQ(kept.tensors.at("exp_avg").scalar_type(), torch::kBFloat16);
      EXPECT_TRUE(torch::equal(kept.tensors.at("exp_avg"), state.at(name).tensors.at("exp_avg"))) << name;
    }
  });
}

// ---- gradients -----------------------------------------------------------------------------------------------------------

/// Gradients that are written count as if backward had brought them, whole or by part, for ours and torch's optimizers.
TEST(Gradients, AreWrittenByName) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const bool ours : {true, false})
      for (const bool whole : {true, false}) {
        auto net = double_net(), plain = double_net();
        auto sharded = shard(net, world, placements);
        std::optional<AdamW> fused;
        std::optional<torch::optim::AdamW> other;
        ours ? void(fused.emplace(sharded, kOurs)) : void(other.emplace(sharded.parameters(), torchs_options()));
        torch::optim::AdamW expected(plain->parameters(), torchs_options());
        for (int64_t s = 0; s < 3; ++s) {
          std::vector<std::pair<std::string, Tensor>> given;
          if (s != 1) {  // step 1 has only what is written
            loss_of(net, world, s).backward();
            loss_of(plain, World{}, s).backward();
            EXPECT_NEAR(sharded.clip_grad_norm(0.4), torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.4), 1e-9);
          }
          for (auto& item : plain->named_parameters()) {
            if (item.key() == "middle.weight") item.value().mutable_grad() = torch::sin(item.value().detach() + s);
            if (item.key() == "first.bias") item.value().mutable_grad() = Tensor();
            if (item.key() == "last.bias") item.value().mutable_grad() = torch::ones({3}, torch::kDouble) * 0.1;
            if (item.key() == "middle.weight" || item.key() == "first.bias" || item.key() == "last.bias")
              given.emplace_back(item.key(), item.value().grad());
          }
          if (whole) {
            sharded.load_gradients(given);
          } else {
            for (auto& [name, value] : given)
              if (value.defined()) value = sharded.local_of(name, value);
            sharded.load_local_gradients(given);
          }
          auto wanted = plain->named_parameters();
          for (const auto& [name, gradient] : sharded.full_gradients()) {
            ASSERT_EQ(gradient.defined(), wanted[name].grad().defined()) << name << " in step " << s;
            if (gradient.defined()) {
              EXPECT_LE(distance(gradient, wanted[name].grad()), 1e-9) << name;
            }
          }
          for (const auto& [name, gradient] : sharded.local_gradients()) {
            ASSERT_EQ(gradient.defined(), wanted[name].grad().defined()) << name;
            if (gradient.defined()) {
              EXPECT_TRUE(torch::allclose(gradient, sharded.local_of(name, wanted[name].grad()), 0, 1e-9)) << name;
            }
          }
          EXPECT_NEAR(sharded.grad_norm(), torch::nn::utils::clip_grad_norm_(plain->parameters(), 1e9), 1e-9);
          ours ? fused->step() : sharded.step(*other);
          expected.step();
          sharded.zero_grad();
          plain->zero_grad();
        }
        auto values = plain->named_parameters();
        for (const auto& [name, value] : sharded.full_parameters()) EXPECT_LE(distance(value, values[name]), 1e-9) << name;
      }
  });
}

TEST(Gradients, FurtherBackwardsAddToWhatWasWritten) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const bool ours : {true, false}) {
      auto net = double_net(), plain = double_net();
      auto sharded = shard(net, world, placements);
      std::optional<AdamW> fused;
      if (ours) fused.emplace(sharded, kOurs);
      const Tensor given = torch::ones({5, 6}, torch::kDouble);
      auto first = loss_of(net, world, 0), second = loss_of(net, world, 1);
      sharded.load_gradients({{"first.weight", given}});
      plain->first->weight.mutable_grad() = given.clone();
      first.backward();
      second.backward();
      for (int64_t s = 0; s < 2; ++s) loss_of(plain, World{}, s).backward();
      auto wanted = plain->named_parameters();
      for (const auto& [name, gradient] : sharded.full_gradients())
        EXPECT_LE(distance(gradient, wanted[name].grad()), 1e-12) << name;
    }
  });
}

TEST(Gradients, RefusalsNameTheParameter) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = double_net();
        net->last->bias.set_requires_grad(false);
        auto sharded = shard(net, world, placements);
        const Tensor right = torch::ones({5, 6}, torch::kDouble);
        expect_words(refusal<ConfigError>([&] { sharded.load_gradients({{"first.wait", right}}); }), {"'first.wait'"});
        expect_words(refusal<ConfigError>([&] {
                       sharded.load_gradients({{"first.bias", right}});
                     }),
                     {"'first.bias'", "[5]"});
        expect_words(refusal<ConfigError>([&] {
                       sharded.load_gradients({{"last.bias", torch::ones({3})}});
                     }),
                     {"'last.bias'", "requires no gradient"});
        expect_words(refusal<AgreementError>([&] {
                       sharded.load_gradients({{"first.weight", right * (world.rank.value + 1)}});
                     }),
                     {"'first.weight'", "ranks 0 and 1"});
      },
      {2});
  on_ranks(1, [](World world) {
    auto net = double_net();
    auto sharded = shard(net, world, zero3());
    AdamW optimizer(sharded, {.fused_reduction = true});
    loss_of(net, world, 0).backward();
    expect_words(refusal<ConfigError>([&] { sharded.local_gradients(); }), {"fused_reduction"});
    expect_words(refusal<ConfigError>([&] { sharded.load_gradients({}); }), {"fused_reduction"});
  });
}

}  // namespace
}  // namespace tessera::test
