// Placement by annotation of single parameters.
#include <gtest/gtest.h>

#include <optional>
#include <sstream>

#include "tessera/base/text.h"
#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;

void expect_same(const std::string& name, const Tensor& got, const Tensor& wanted) {
  EXPECT_TRUE(torch::allclose(got, wanted, 1e-5, 1e-6)) << name << '\n' << got << wanted;
}

// Three steps of two micro-batches, against the unsharded run.
// `held_of_two`: how many of them are.
template <class Optimizer>
void train(NetS& net, Sharded& sharded, Optimizer& optimizer, const World& world, bool clip, int held_of_two) {
  auto plain = common_net();
  torch::optim::AdamW reference(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.01));
  const auto wanted = plain->named_parameters();
  for (int64_t step = 0; step < 3; ++step) {
    for (int64_t micro = 0; micro < 2; ++micro) {
      std::optional<Sharded::Accumulating> held;
      if (micro < held_of_two) held.emplace(sharded.engine());
      net_s_loss(net, world, 2 * step + micro).backward();
      net_s_loss(plain, World{}, 2 * step + micro).backward();
    }
    if (clip) {
      for (const auto& [name, gradient] : gradients_of(sharded)) expect_same(name, gradient, wanted[name].grad());
      EXPECT_NEAR(sharded.clip_grad_norm(0.3), torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.3), 1e-6);
    }
    optimizer.step();
    optimizer.zero_grad();
    reference.step();
    reference.zero_grad();
    for (const auto& [name, value] : sharded.full_parameters()) expect_same(name, value, wanted[name]);
  }
  sharded.release();
  expect_all_sharded(sharded);
}

void train(const World& world, const Mesh& mesh, const Annotations& parameters, const Annotations& state) {
  for (const int held : {1, 2})
    for (const std::string optimizer : {"ours", "fused", "torch"}) {
      SCOPED_TRACE(text(optimizer, ", ", held, " held"));
      auto net = common_net();
      auto sharded = annotate(net, mesh, parameters, state, {.units = named({"middle"})});
      if (optimizer == "torch") {
        torch::optim::AdamW theirs(sharded.parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.01));
        train(net, sharded, theirs, world, true, held);
      } else {
        AdamW ours(sharded, {.lr = 0.02, .weight_decay = 0.01, .fused_reduction = optimizer == "fused"});
        train(net, sharded, ours, world, optimizer == "ours", held);
      }
    }
}

const Annotations kAll = {{"*", P("data")}};

TEST(Annotate, MixedInOneModel) {
  for (const int ranks : {1, 2, 3, 4})
    on_ranks(ranks, [](const World& world) {
      const Mesh mesh(world);
      train(world, mesh, {{"*.weight", P("data")}}, {});                        // biases whole
      train(world, mesh, {{"*.weight", P("data")}, {"*.bias", P()}}, kAll);     // biases' state divided
      train(world, mesh, {{"middle.*", P("data")}}, {{"first.*", P("data")}});  // all three in one model
      train(world, mesh, {{"first.weight", P(std::nullopt, "data")}, {"last.weight", P("data")}},
            {{"first.bias", P("data")}, {"first.weight", P(std::nullopt, "data")}});
    });
}

TEST(Annotate, MixedOnTwoAxes) {
  on_ranks(4, [](const World& world) {
    const Mesh mesh(world, {{"replicate", 2}, {"shard", 2}});
    const DividedOver both = {"replicate", "shard"};
    train(world, mesh, {{"*.weight", P("shard")}}, {});
    train(world, mesh, {{"first.*", P("shard")}, {"middle.*", P(both)}},
          {{"first.weight", P({"shard", "replicate"})}, {"last.bias", P(both)}});
    train(world, mesh, {{"first.*", P("replicate")}, {"last.weight", P(std::nullopt, "shard")}}, {});
  });
}

// Schedule, traffic, bytes and bits are those of the placement that the annotations say.
struct Alike {
  Annotations parameters, state;
  Placements placements;
};

TEST(Annotate, IsThePlacementThatItSays) {
  const Alike cases[] = {{{{"*", P("data")}}, {}, zero3()},
                         {{{"*", P("data")}}, kAll, zero3()},
                         {{}, kAll, zero1()},
                         {{{"*", P()}}, kAll, zero1()},
                         {{}, {}, ddp()},
                         {{{"*", P("shard")}}, {}, hybrid("shard", "replicate")},
                         {{{"*", P("shard")}}, {{"*", P({"replicate", "shard"})}}, hybrid("shard", "replicate", true)}};
  for (const auto& each : cases)
    on_ranks(4, [&each](const World& world) {
      const Mesh mesh = mesh_for(world, each.placements);
      const auto run = [&](bool annotated) {
        auto net = common_net();
        const auto layout = each.placements == ddp() ? flat() : per_parameter();
        auto sharded =
            annotated ? annotate(net, mesh, each.parameters, each.state, {.units = named({"middle"})})
                      : fully_shard(net, mesh,
                                    {.placements = each.placements, .units = named({"middle"}), .layouts = {{"*", layout}}});
        AdamW optimizer(sharded, {.lr = 0.02});
        std::ostringstream words;
        for (int64_t step = 0; step < 3; ++step) {
          net_s_loss(net, world, step).backward();
          words << std::hexfloat << sharded.clip_grad_norm(0.3) << '\n';
          optimizer.step();
          optimizer.zero_grad();
        }
        for (const auto& [name, value] : sharded.full_parameters()) words << name << value;
        const auto traffic = sharded.engine().traffic();
        const auto bytes = sharded.state_bytes(8);
        words << sharded.schedule() << traffic.gathers << ' ' << traffic.reductions << ' ' << traffic.gathered.value << ' '
              << traffic.reduced.value << '\n'
              << bytes.parameters << ' ' << bytes.gradients << ' ' << bytes.optimizer << ' ' << bytes.padding;
        return words.str();
      };
      EXPECT_EQ(run(true), run(false)) << name_of(each.placements);
    });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() : table(register_parameter("table", torch::ones({4, 4}))), head(register_parameter("head", table)) {}
  Tensor table, head;
};
TORCH_MODULE(Tied);

TEST(Annotate, Refusals) {
  on_ranks(2, [](const World& world) {
    const auto refused = [&](const Annotations& parameters, const Annotations& state, const ShardOptions& options = {}) {
      auto net = common_net();
      return refusal<ConfigError>([&] { annotate(net, Mesh(world), parameters, state, options); });
    };
    expect_words(refused({{"*.weight", P("data")}, {"first.*", P()}}, {}),
                 {"values of 'first.weight'", "'*.weight' says P(data)", "'first.*' says P()"});
    expect_words(refused(kAll, {{"*", P("data")}, {"last.*", P()}}), {"optimizer state of 'last.", "disagree"});
    expect_words(refused({{"head.*", P("data")}}, {}), {"'head.*'", "values", "no parameter"});
    expect_words(refused({}, {{"head.*", P("data")}}), {"'head.*'", "optimizer state", "no parameter"});
    expect_words(refused({{"last.*", P("model")}}, {}), {"'last.", "no axis 'model'", "'data' (2)"});
    expect_words(refused({{"*", P(std::nullopt, "data")}}, {}), {"'first.bias'", "divides dim 1", "1 dims"});
    expect_words(refused(kAll, {{"*", P()}}), {"'first.weight'", "the state must be divided too"});
    expect_words(refused(kAll, {}, {.placements = zero1()}), {"follow from the annotations"});
    expect_words(refused(kAll, {}, {.layouts = {{"*", flat()}}}), {"follow from the annotations"});
    Tied tied;
    expect_words(refusal<ConfigError>([&] {
                   annotate(tied, Mesh(world), {{"head", P("data")}});
                 }),
                 {"tied parameter 'table' is annotated P()", "as 'head' P(data)", "both names alike"});
    annotate(tied, Mesh(world), kAll);
  });
  on_ranks(2, [](const World& world) {
    auto net = common_net();
    const Annotations mine = world.rank.value == 0 ? kAll : Annotations{{"*.weight", P("data")}};
    expect_words(refusal<AgreementError>([&] { annotate(net, Mesh(world), mine); }), {"'*' P(data)", "'*.weight' P(data)"});
  });
}

}  // namespace
}  // namespace tessera::test
