// Models built under Deferred are those built at once, bit for bit.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "models/llama.h"
#include "tests/support/cases.h"
#include "tests/support/deferred_helpers.h"
#include "tests/support/on_ranks.h"

namespace tessera::test {
namespace {

using torch::Tensor;

// ---- the numbers ---------------------------------------------------------------------------------------------------

models::LlamaConfig llama_config(bool tied) {
  return {.layers = 3, .width = 16, .heads = 4, .kv_heads = 2, .hidden = 24, .vocab = 40, .context = 8, .tied = tied};
}
UnitPolicy llama_blocks() { return units_of<models::LlamaBlockImpl>(); }

TEST(Deferred, LlamaIsBitEqualInEveryPlacement) {
  for (const bool tied : {false, true})
    expect_sharded_as_eager([tied] { return models::Llama(llama_config(tied)).ptr(); }, llama_blocks());
}

TEST(Deferred, LlamaTrainsAsOneBuiltAtOnce) {
  for_every_placement([](const World& world, const Placements& placements) {
    const auto train = [&](models::Llama net) {
      auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements, .units = llama_blocks()});
      AdamW optimizer(sharded, {.lr = 0.01});
      const auto tokens = torch::arange(18).view({2, 9}) + world.rank.value;
      for (int step = 0; step < 3; ++step) {
        net->loss(tokens).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      return whole(sharded, *net);
    };
    torch::manual_seed(1);
    const auto wanted = train(models::Llama(llama_config(true)));
    torch::manual_seed(1);
    const auto got = train(deferred([] { return models::Llama(llama_config(true)); }));
    expect_equal(wanted, got);
  });
}

// Every kind of stock module that has parameters or buffers.
struct ZooImpl : torch::nn::Module {
  ZooImpl() {
    using namespace torch::nn;
    register_module("linear", Linear(5, 7));
    register_module("bilinear", Bilinear(3, 4, 5));
    register_module("embedding", Embedding(EmbeddingOptions(11, 6).padding_idx(2)));
    register_module("bag", EmbeddingBag(7, 3));
    register_module("convolution", Conv2d(Conv2dOptions(3, 4, 3)));
    register_module("transposed", ConvTranspose1d(ConvTranspose1dOptions(3, 4, 3)));
    register_module("batch_norm", BatchNorm2d(4));
    register_module("instance_norm", InstanceNorm1d(InstanceNorm1dOptions(4).affine(true).track_running_stats(true)));
    register_module("group_norm", GroupNorm(2, 4));
    register_module("layer_norm", LayerNorm(LayerNormOptions({4})));
    register_module("lstm", LSTM(LSTMOptions(4, 5).num_layers(2).bidirectional(true)));
    register_module("gru", GRU(4, 5));
    register_module("attention", MultiheadAttention(MultiheadAttentionOptions(8, 2).add_bias_kv(true)));
    register_module("transformer", TransformerEncoder(TransformerEncoderOptions(TransformerEncoderLayerOptions(8, 2), 2)));
    register_module("prelu", PReLU());
    register_module("adaptive", AdaptiveLogSoftmaxWithLoss(AdaptiveLogSoftmaxWithLossOptions(32, 20, {5, 10})));
  }
};
TORCH_MODULE(Zoo);

TEST(Deferred, StockModulesMaterializeBitEqual) {
  expect_materialized_as_eager([] { return std::make_shared<ZooImpl>(); });
}

TEST(Deferred, StockModulesShardBitEqual) {
  expect_sharded_as_eager([] { return std::make_shared<ZooImpl>(); }, named({"lstm", "attention", "batch_norm", "linear"}),
                          {1, 3});
}

TEST(Deferred, Initialisers) {
  expect_materialized_as_eager(filled([](FilledImpl& net) {
    namespace init = torch::nn::init;
    const auto matrix = [&](const char* name) { return net.parameter(name, torch::empty({9, 6})); };
    init::normal_(matrix("normal"), 1.0, 0.3);
    init::uniform_(matrix("uniform"), -2, 3);
    init::constant_(matrix("constant"), 0.25);
    init::ones_(matrix("ones"));
    init::zeros_(matrix("zeros"));
    init::eye_(matrix("eye"));
    init::dirac_(net.parameter("dirac", torch::empty({4, 3, 3})));
    init::orthogonal_(matrix("orthogonal"), 1.5);
    init::orthogonal_(net.parameter("wide", torch::empty({4, 10})));
    {
      const Deferred::Pause pause;  // it reads the rows that it drew
      init::sparse_(net.parameter("real sparse", torch::empty({9, 6})), 0.4);
    }
    init::xavier_normal_(matrix("xavier_normal"));
    init::xavier_uniform_(matrix("xavier_uniform"));
    init::kaiming_normal_(matrix("kaiming_normal"));
    init::kaiming_uniform_(matrix("kaiming_uniform"), 2.0);
    const torch::NoGradGuard no_grad;
    matrix("truncated").uniform_(-1, 1).erfinv_().mul_(0.02).clamp_(-0.03, 0.03);
    matrix("exponential").exponential_();
    matrix("bernoulli").bernoulli_(0.3);
    matrix("bernoulli_of").bernoulli_(torch::rand({9, 6}));
    matrix("geometric").geometric_(0.4);
    matrix("cauchy").cauchy_();
    matrix("log_normal").log_normal_();
    net.parameter("integers", torch::empty({30}, torch::kLong).random_(0, 100), false);
    net.parameter("permutation", torch::randperm(20), false);
    net.parameter("multinomial", torch::multinomial(torch::rand({10}), 20, true), false);
    net.parameter("poisson", torch::poisson(torch::rand({30}) * 5));
    net.parameter("dropped", torch::dropout(torch::ones({40}), 0.5, true));
    net.parameter("like", torch::randn_like(torch::empty({3, 4})));
    net.parameter("of_bfloat16", torch::randn({40}, torch::kBFloat16));
  }));
}

TEST(Deferred, WritesToViewsAndArithmetic) {
  expect_materialized_as_eager(filled([](FilledImpl& net) {
    const torch::NoGradGuard no_grad;
    auto a = net.parameter("a", torch::randn({6, 4}));
    a[0].zero_();
    a[1][2] = 5;
    a.t()[3].uniform_();  // not contiguous: draws in another order
    a.narrow(0, 2, 2).normal_();
    a.view({3, 8}).select(0, 2).add_(1);
    a.mul_(0.5).add_(torch::ones({4}));
    a.index_put_({torch::tensor({4, 5})}, torch::randn({2, 4}));
    auto b = net.parameter("b", torch::randn({4, 6}).t());
    b.copy_(a * 2 + a.sum());
    auto c = net.parameter("c", torch::stack({a, b}).permute({2, 0, 1}));
    c.data()[1].fill_diagonal_(3);
    c.detach().slice(2, 0, 6, 3).fill_(9);
    auto d = net.parameter("d", torch::empty({0}));
    d.set_data(torch::randn({2, 3}));
    net.parameter("e", torch::cat({a.flatten(), b.flatten()}).chunk(2)[0].clone());
    auto [q, r] = torch::linalg_qr(torch::randn({5, 5}));
    net.parameter("q", q.matmul(r).tril());
    net.parameter("positive", a.masked_select(a > 0));
    auto turned = torch::randn({3, 7});
    turned.t_();
    turned.unsqueeze_(0);
    turned[0][1].fill_(1);
    net.parameter("turned", turned);
    net.parameter("complex", torch::view_as_real(torch::polar(torch::rand({4}), torch::rand({4})).conj().mul(2)).clone());
    net.parameter("table", torch::outer(torch::arange(6), 1.0 / torch::pow(10, torch::linspace(0, 1, 3))).cos());
  }));
}

TEST(Deferred, ValuesOfRealTensorsAreThoseOfTheirTime) {
  auto real = torch::zeros({12});
  const auto build = filled([&](FilledImpl& net) {
    const torch::NoGradGuard no_grad;
    auto a = net.parameter("a", torch::empty({12}));
    {
      const Deferred::Pause pause;
      real.copy_(torch::arange(12));
    }
    a.copy_(real);
    real.fill_(-1);
    net.parameter("b", torch::empty({12})).copy_(real).add_(a);
    std::vector<float> local{4, 5, 6};
    net.parameter("c", torch::empty({3})).copy_(torch::from_blob(local.data(), {3}));
    local = {0, 0, 0};
  });
  expect_materialized_as_eager(build);
  expect_sharded_as_eager(build, nullptr, {1, 2});
}

TEST(Deferred, DefaultTypeIsThatOfConstruction) {
  const auto build = filled([](FilledImpl& net) {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    net.parameter("doubles", torch::randn({20}));
    net.parameter("sum", torch::arange(0, 1, 0.1) + torch::full({10}, 0.1));
    torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
    net.parameter("floats", torch::randn({20}));
  });
  expect_materialized_as_eager(build);
}

TEST(Deferred, OtherTypesAndSeedsAndGenerators) {
  expect_sharded_as_eager(
      [] {
        auto net = std::make_shared<ZooImpl>();
        net->to(torch::kBFloat16);
        torch::manual_seed(99);
        net->register_module("later", torch::nn::Linear(4, 4));
        net->named_children()["later"]->to(torch::kDouble);
        const torch::NoGradGuard no_grad;
        auto own = at::make_generator<at::CPUGeneratorImpl>(5);
        net->named_parameters()["later.weight"].normal_(0, 1, own).add_(torch::randn({4, 4}, own));
        return net;
      },
      named({"linear", "later"}), {2});
}

// The root's parameters draw before, between and after those of the units, and one copies another unit's.
TEST(Deferred, UnitsDrawFromOneStream) {
  struct Mixed : torch::nn::Module {
    Mixed() {
      const torch::NoGradGuard no_grad;
      auto first = register_parameter("first", torch::randn({5, 5}));
      auto a = register_module("a", torch::nn::Linear(5, 5)), b = register_module("b", torch::nn::Linear(5, 5));
      register_parameter("between", torch::rand({3}));
      a->weight.normal_();
      b->weight.copy_(a->weight).add_(first);
      a->weight.mul_(2);
      register_buffer("copy", b->weight.clone());
      b->bias.uniform_();
      register_parameter("last", torch::rand({3}));
    }
  };
  expect_sharded_as_eager([] { return std::make_shared<Mixed>(); }, named({"a", "b"}));
}

TEST(Deferred, TiedParametersStayTied) {
  for_every_placement([](const World& world, const Placements& placements) {
    const auto build = filled([](FilledImpl& net) {
      const auto shared = net.parameter("first", torch::randn({4, 4}));
      net.parameter("second", shared);
    });
    const auto made = both(build);
    auto sharded = fully_shard(*made.deferred, mesh_for(world, placements), {.placements = placements});
    const auto parameters = made.deferred->named_parameters();
    EXPECT_TRUE(parameters["first"].is_same(parameters["second"]));
    EXPECT_EQ(sharded.parameter_count(), 16);
    (parameters["first"] * 2 + parameters["second"]).sum().backward();
    EXPECT_TRUE(torch::equal(gradients_of(sharded)["first"], torch::full({4, 4}, 3)));
  });
}

TEST(Deferred, FrozenAndEmptyParametersAndLaterScopes) {
  const auto build = filled([](FilledImpl& net) {
    net.parameter("frozen", torch::randn({4}), false);
    net.parameter("empty", torch::randn({0, 3}));
    net.parameter("scalar", torch::randn({}));
    net.parameter("trained", torch::randn({4})).requires_grad_(true);
  });
  expect_sharded_as_eager(build, nullptr, {1, 3});
  torch::manual_seed(7);
  const auto eager = build();
  eager->to(torch::kDouble);
  torch::manual_seed(7);
  const auto net = deferred(build);
  {
    const Deferred later;
    net->to(torch::kDouble);
  }
  materialize(*net);
  expect_equal(registered(*eager), registered(*net));
}

}  // namespace
}  // namespace tessera::test
