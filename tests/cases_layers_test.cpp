// libtorch's own layers, each in every placement against the unsharded run; buffers that a layer computes with.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/refusal.h"
#include "tests/support/training_loop.h"

namespace tessera::test {
namespace {

using torch::Tensor;
namespace nn = torch::nn;

constexpr auto kDouble = torch::kDouble;

Tensor samples(int64_t step, int rank, std::vector<int64_t> shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return torch::cos(0.9 * torch::arange(count, kDouble) + 0.3 * step + 0.7 * rank).view(shape);
}

/// A module between a linear layer and a sum of squares; the module and the layer are units.
template <class Layer>
struct AroundImpl : nn::Module {
  using Forward = std::function<Tensor(Layer&, const Tensor&)>;
  AroundImpl(Layer layer, Forward forward)
      : before(register_module("before", nn::Linear(6, 6))),
        layer(register_module("layer", layer)),
        forward_(std::move(forward)) {
    to(kDouble);
    set_common_values(*this);
  }
  Tensor forward(const Tensor& x) { return forward_(layer, before(x)); }
  nn::Linear before{nullptr};
  Layer layer{nullptr};

 private:
  Forward forward_;
};

/// Trains `layer` on samples of shape [4, 6].
template <class Layer>
void expect_layer(const std::function<Layer()>& layer, typename AroundImpl<Layer>::Forward forward) {
  using Around = nn::ModuleHolder<AroundImpl<Layer>>;
  expect_as_unsharded<Around>({.build =
                                   [layer, forward] {
                                     torch::manual_seed(0);
                                     return Around(layer(), forward);
                                   },
                               .loss =
                                   [](Around& net, int64_t step, int rank) {
                                     torch::manual_seed(static_cast<uint64_t>(step));
                                     return net(samples(step, rank, {4, 6})).pow(2).mean();
                                   },
                               .options = {.units = named({"before", "layer"}), .buffers = Buffers::local}},
                              {1, 2, 3});
}

TEST(CasesLayers, Convolutions) {
  expect_layer<nn::Conv1d>([] { return nn::Conv1d(nn::Conv1dOptions(2, 4, 2).groups(2).stride(1)); },
                           [](nn::Conv1d& layer, const Tensor& x) {
                             return layer(x.view({4, 2, 3}));
                           });
  expect_layer<nn::Conv2d>(
      [] {
        return nn::Conv2d(nn::Conv2dOptions(1, 3, {2, 2}).padding(1).dilation(2).padding_mode(torch::kCircular));
      },
      [](nn::Conv2d& layer, const Tensor& x) {
        return layer(x.view({4, 1, 2, 3}));
      });
  expect_layer<nn::Conv3d>(
      [] {
        return nn::Conv3d(nn::Conv3dOptions(1, 2, {1, 2, 2}).bias(false));
      },
      [](nn::Conv3d& layer, const Tensor& x) {
        return layer(x.view({2, 1, 2, 2, 3}));
      });
  expect_layer<nn::ConvTranspose2d>(
      [] {
        return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(2, 3, {2, 2}).stride(2));
      },
      [](nn::ConvTranspose2d& layer, const Tensor& x) {
        return layer(x.view({4, 2, 1, 3}));
      });
}

TEST(CasesLayers, ConvolutionsInChannelsLast) {
  expect_layer<nn::Conv2d>(
      [] {
        nn::Conv2d layer(nn::Conv2dOptions(2, 3, {1, 2}));
        layer->weight.set_data(layer->weight.contiguous(torch::MemoryFormat::ChannelsLast));
        return layer;
      },
      [](nn::Conv2d& layer, const Tensor& x) {
        return layer(x.view({4, 2, 1, 3}).contiguous(torch::MemoryFormat::ChannelsLast));
      });
}

TEST(CasesLayers, Recurrent) {
  const auto sequence = [](const Tensor& x) { return x.view({4, 2, 3}); };
  expect_layer<nn::LSTM>([] { return nn::LSTM(nn::LSTMOptions(3, 5).num_layers(2).bidirectional(true).batch_first(true)); },
                         [sequence](nn::LSTM& layer, const Tensor& x) { return std::get<0>(layer(sequence(x))); });
  expect_layer<nn::GRU>([] { return nn::GRU(nn::GRUOptions(3, 4)); },
                        [sequence](nn::GRU& layer, const Tensor& x) { return std::get<0>(layer(sequence(x))); });
  expect_layer<nn::LSTMCell>([] { return nn::LSTMCell(nn::LSTMCellOptions(6, 3)); },
                             [](nn::LSTMCell& layer, const Tensor& x) { return std::get<0>(layer(x)); });
}

TEST(CasesLayers, Attention) {
  expect_layer<nn::TransformerEncoderLayer>(
      [] { return nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(6, 2).dim_feedforward(7).dropout(0.2)); },
      [](nn::TransformerEncoderLayer& layer, const Tensor& x) {
        return layer(x.view({4, 1, 6}));
      });
  expect_layer<nn::MultiheadAttention>(
      [] { return nn::MultiheadAttention(nn::MultiheadAttentionOptions(6, 3).kdim(3).vdim(3)); },
      [](nn::MultiheadAttention& layer, const Tensor& x) {
        return std::get<0>(layer(x.view({4, 1, 6}), x.slice(1, 0, 3).unsqueeze(1), x.slice(1, 3, 6).unsqueeze(1)));
      });
}

TEST(CasesLayers, Norms) {
  expect_layer<nn::BatchNorm1d>([] { return nn::BatchNorm1d(6); },
                                [](nn::BatchNorm1d& layer, const Tensor& x) { return layer(x).pow(3); });
  expect_layer<nn::GroupNorm>([] { return nn::GroupNorm(nn::GroupNormOptions(2, 6)); },
                              [](nn::GroupNorm& layer, const Tensor& x) {
                                return layer(x.view({2, 6, 2})).pow(3);
                              });
  expect_layer<nn::InstanceNorm1d>(
      [] { return nn::InstanceNorm1d(nn::InstanceNorm1dOptions(2).affine(true).track_running_stats(true)); },
      [](nn::InstanceNorm1d& layer, const Tensor& x) {
        return layer(x.view({4, 2, 3})).pow(3);
      });
}

TEST(CasesLayers, Others) {
  expect_layer<nn::PReLU>([] { return nn::PReLU(); }, [](nn::PReLU& layer, const Tensor& x) { return layer(x); });
  expect_layer<nn::Bilinear>([] { return nn::Bilinear(nn::BilinearOptions(2, 4, 3)); },
                             [](nn::Bilinear& layer, const Tensor& x) {
                               return layer(x.slice(1, 0, 2).contiguous(), x.slice(1, 2, 6).contiguous());
                             });
}

TEST(CasesLayers, Embeddings) {
  const auto tokens = [](const Tensor& x) {
    return (x.detach().flatten() * 3 + 4).to(torch::kLong).remainder(9).view({4, 6});
  };
  for (const bool sparse : {false, true}) {
    expect_layer<nn::Embedding>(
        [sparse] { return nn::Embedding(nn::EmbeddingOptions(9, 5).padding_idx(2).sparse(sparse)); },
        [tokens](nn::Embedding& layer, const Tensor& x) {
          return layer(tokens(x)).sum(1) * x.sum(1, true) + layer(torch::tensor({{1, 7}})).sum();  // twice
        });
    expect_layer<nn::EmbeddingBag>(
        [sparse] { return nn::EmbeddingBag(nn::EmbeddingBagOptions(9, 5).mode(torch::kSum).sparse(sparse)); },
        [tokens](nn::EmbeddingBag& layer, const Tensor& x) { return layer(tokens(x)) * x.sum(1, true); });
  }
}

// A vocabulary that no number of ranks divides, tied to the output.
struct OutputImpl : nn::Module {
  explicit OutputImpl(const Tensor& tied) : weight(register_parameter("weight", tied)) {}
  Tensor forward(const Tensor& x) { return torch::linear(x, weight); }
  Tensor weight;
};
TORCH_MODULE(Output);
struct TiedImpl : nn::Module {
  explicit TiedImpl(int64_t vocab)
      : tokens(register_module("tokens", nn::Embedding(vocab, 6))),
        inner(register_module("inner", nn::Linear(6, 6))),
        output(register_module("output", Output(tokens->weight))) {
    to(kDouble);
    set_common_values(*this);
  }
  nn::Embedding tokens{nullptr};
  nn::Linear inner{nullptr};
  Output output{nullptr};
};
TORCH_MODULE(Tied);

TEST(CasesLayers, TiedRowsOfAnOddVocabularyAllChange) {
  for (const bool again : {false, true})
    for (const int64_t vocab : {5, 9, 21}) {
      TrainingLoop<Tied> loop{.build = [vocab] { return Tied(vocab); },
                              .loss =
                                  [again, vocab](Tied& net, int64_t step, int rank) {
                                    const auto in = (torch::arange(4) * 3 + step + rank).remainder(vocab);
                                    Tensor x = net->tokens(in);
                                    x = again ? recompute(net->inner, x) : net->inner(x);
                                    return torch::cross_entropy_loss(net->output(torch::tanh(x)), (in + 1).remainder(vocab));
                                  },
                              .options = {.units = named({"tokens", "inner", "output"}),
                                          .layouts = {{"*", per_parameter()}},
                                          .joined = {"[to]*"}}};
      expect_as_unsharded(loop, {2, 4});
      on_ranks(4, [&](World world) {
        auto net = loop.build();
        const Tensor before = net->tokens->weight.detach().clone();
        auto options = loop.options;
        auto sharded = fully_shard(net, Mesh(world), options);
        AdamW optimizer(sharded, {.lr = 0.01});
        for (int64_t step = 0; step < 10; ++step) {
          loop.loss(net, step, world.rank.value).backward();
          optimizer.step();
          optimizer.zero_grad();
        }
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE((net->output->weight != before).any(1).all().item<bool>());
        EXPECT_TRUE(torch::equal(net->output->weight.clone(), net->tokens->weight.clone()));
      });
    }
}

// ---- buffers of a convolution (B21) --------------------------------------------------------------------------------------

struct SmoothedImpl : nn::Module {
  SmoothedImpl()
      : linear(register_module("linear", nn::Linear(4, 4))),
        kernel(register_buffer("kernel", torch::tensor({0.25f, 0.5f, 0.25f}).view({1, 1, 3}))) {
    set_common_values(*this);
  }
  Tensor forward(const Tensor& x) { return torch::conv1d(linear(x).unsqueeze(1), kernel, {}, /*stride=*/1, /*padding=*/1); }
  nn::Linear linear{nullptr};
  Tensor kernel;
};
TORCH_MODULE(Smoothed);

TEST(Cases, B21ASmoothingKernelFollowsTheTypeOfBuffers) {
  for_every_placement([](const World& world, const Placements& placements) {
    const Tensor x = input_rows(0, 0, 4, 4, torch::kBFloat16);
    Smoothed net, plain;
    plain->to(torch::kBFloat16);
    auto sharded = fully_shard(net, mesh_for(world, placements),
                               {.placements = placements,
                                .units = named({"linear"}),
                                .precision = {.working = torch::kBFloat16, .buffers = torch::kBFloat16}});
    EXPECT_EQ(net->kernel.scalar_type(), torch::kBFloat16);
    const auto loss = net(x).to(torch::kFloat).pow(2).mean(), expected = plain(x).to(torch::kFloat).pow(2).mean();
    loss.backward();
    expected.backward();
    EXPECT_EQ(loss.item<float>(), expected.item<float>());
    // Every rank has the same rows, so that the mean of the gradients is each of them, up to one rounding of the mean.
    for (const auto& [name, gradient] : sharded.full_gradients())
      EXPECT_TRUE(torch::allclose(gradient, plain->named_parameters()[name].grad(), world.size == 3 ? 0.01 : 0, 0)) << name;
  });
}

TEST(Cases, B21ABufferOfAnotherTypeIsTorchsError) {
  for_every_placement([](const World& world, const Placements& placements) {
    Smoothed net;
    const auto sharded = fully_shard(net, mesh_for(world, placements),
                                     {.placements = placements, .precision = {.working = torch::kBFloat16}});
    EXPECT_EQ(net->kernel.scalar_type(), torch::kFloat) << "buffers stay as they are unless asked";
    expect_words(refusal<std::exception>([&] { net(input_rows(0, 0, 4, 4, torch::kBFloat16)); }),
                 {"BFloat16"});  // in words that depend on the processor
  });
}

}  // namespace
}  // namespace tessera::test
