// Complex parameters, whose numbers optimizers treat as pairs of reals (as PyTorch's do), and integer ones.
#include <gtest/gtest.h>

#include <optional>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;

// Complex parameters of two types, of no dims and of odd sizes, a real one and an integer one.
struct WavesImpl : torch::nn::Module {
  WavesImpl() {
    torch::manual_seed(7);
    weight = register_parameter("weight", torch::randn({4, 5}, torch::kComplexDouble));
    bias = register_parameter("bias", torch::randn({5}, torch::kComplexFloat));
    turn = register_parameter("turn", torch::randn({}, torch::kComplexDouble));
    frozen = register_parameter("frozen", torch::randn({3, 5}, torch::kComplexDouble).t(), false);
    gain = register_parameter("gain", torch::randn({3}, torch::kDouble));
    indices = register_parameter("indices", torch::tensor({2, 0, 1}), false);
  }

  Tensor forward(const Tensor& x) {
    const auto y = torch::matmul(x.to(torch::kComplexDouble), weight) * turn + bias.conj();
    const auto z = torch::matmul(y, frozen).index_select(1, indices);
    return torch::real(z * turn.conj()) * gain + torch::imag(z).tanh();
  }

  Tensor weight, bias, turn, frozen, gain, indices;
};
TORCH_MODULE(Waves);

Tensor rows(int64_t step, int64_t begin, int64_t end) { return input_rows(step, begin, end, 4, torch::kDouble); }

// Of `ranks` such parts the mean is the loss of all eight rows.
Tensor loss_of(Waves& net, int64_t step, int64_t begin, int64_t end, int ranks = 1) {
  return net(rows(step, begin, end)).pow(2).sum() * (ranks / 24.0);
}

void expect_equal(const std::string& name, const Tensor& got, const Tensor& wanted) {
  const double tolerance = wanted.scalar_type() == torch::kComplexFloat ? 1e-5 : 1e-11;
  ASSERT_EQ(got.scalar_type(), wanted.scalar_type()) << name;
  ASSERT_EQ(got.sizes(), wanted.sizes()) << name;
  EXPECT_TRUE(torch::allclose(got, wanted, tolerance, tolerance)) << name << '\n' << got << wanted;
}

// AdamW on an unsharded net.
class Plain {
 public:
  Plain() : optimizer_(pairs(), torch::optim::AdamWOptions(0.02).weight_decay(0.01)) {}
  void step() {
    size_t i = 0;
    for (const auto& parameter : net->parameters())
      if (parameter.requires_grad()) {
        const auto& gradient = parameter.grad();
        parts_[i++].mutable_grad() = gradient.is_complex() ? torch::view_as_real(gradient.resolve_conj()) : gradient;
      }
    optimizer_.step();
    net->zero_grad();
  }

  Waves net;

 private:
  std::vector<Tensor> pairs() {
    for (const auto& parameter : net->parameters()) {
      const auto values = parameter.detach();  // the same memory
      if (parameter.requires_grad()) parts_.push_back(values.is_complex() ? torch::view_as_real(values) : values);
    }
    return parts_;
  }

  std::vector<Tensor> parts_;
  torch::optim::AdamW optimizer_;
};

template <class Optimizer>
void train(Waves& net, Sharded& sharded, Optimizer& optimizer, const World& world) {
  Plain plain;
  const int64_t begin = 8 * world.rank.value / world.size, end = 8 * (world.rank.value + 1) / world.size;
  for (int64_t step = 0; step < 4; ++step) {
    loss_of(net, step, begin, end, world.size).backward();
    const auto whole = loss_of(plain.net, step, 0, 8);
    whole.backward();
    double squares = 0;
    const auto gradients = gradients_of(sharded);
    for (const auto& item : plain.net->named_parameters()) {
      ASSERT_EQ(gradients.at(item.key()).defined(), item.value().requires_grad()) << item.key();
      if (!item.value().requires_grad()) continue;
      expect_equal(item.key(), gradients.at(item.key()), item.value().grad());
      squares += item.value().grad().abs().pow(2).sum().item<double>();
    }
    EXPECT_NEAR(sharded.grad_norm(), std::sqrt(squares), 1e-5);
    optimizer.step();
    optimizer.zero_grad();
    plain.step();
    const auto wanted = plain.net->named_parameters();
    for (const auto& [name, value] : sharded.full_parameters()) expect_equal(name, value, wanted[name]);
    const torch::NoGradGuard no_grad;
    expect_equal("loss without gradients", loss_of(net, step, 0, 8), loss_of(plain.net, step, 0, 8));
  }
}

TEST(Complex, EqualsTheUnshardedRun) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const auto& layout : {flat(), per_parameter()})
          for (const bool ours : {true, false}) {
            Waves net;
            auto sharded =
                fully_shard(net, mesh_for(world, placements), {.placements = placements, .layouts = {{"*", layout}}});
            EXPECT_EQ(sharded.parameter_count(), 20 + 5 + 1 + 15 + 3 + 3);
            if (ours) {
              AdamW optimizer(sharded, {.lr = 0.02, .weight_decay = 0.01});
              train(net, sharded, optimizer, world);
            } else {
              torch::optim::AdamW optimizer(sharded.parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.01));
              train(net, sharded, optimizer, world);
            }
          }
      },
      {1, 2, 3});
}

TEST(Complex, WrittenReplacedAndLoaded) {
  for_every_placement([](const World& world, const Placements& placements) {
    Waves net, plain;
    auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements});
    {
      const torch::NoGradGuard no_grad;
      for (Waves* each : {&net, &plain}) {
        (*each)->weight.mul_(c10::complex<double>(0.5, 2));
        torch::real((*each)->bias).add_(1);
      }
    }
    expect_equal("written", loss_of(net, 0, 0, 8), loss_of(plain, 0, 0, 8));
    net->turn.set_data(torch::full({}, c10::complex<double>(0.25, -1), torch::kComplexDouble));
    plain->turn.set_data(torch::full({}, c10::complex<double>(0.25, -1), torch::kComplexDouble));
    sharded.adopt();
    expect_equal("replaced", loss_of(net, 0, 0, 8), loss_of(plain, 0, 0, 8));
    std::vector<std::pair<std::string, Tensor>> values;
    Waves other;
    for (const auto& item : other->named_parameters()) values.emplace_back(item.key(), item.value().detach());
    sharded.load_parameters(values);
    expect_equal("loaded", loss_of(net, 0, 0, 8), loss_of(other, 0, 0, 8));
    sharded.load_parameters({{"bias", torch::ones({5}, torch::kDouble)}}, /*strict=*/false);
    EXPECT_TRUE(torch::equal(net->bias, torch::ones({5}, torch::kComplexFloat)));
    expect_words(refusal<ConfigError>([&] {
                   sharded.load_parameters({{"gain", torch::ones({3}, torch::kComplexDouble)}}, /*strict=*/false);
                 }),
                 {"'gain'", "complex"});
  });
}

TEST(Complex, StateByNameAveragesAndCopies) {
  for_every_placement([](const World& world, const Placements& placements) {
    Waves net, other;
    auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements});
    AdamW optimizer(sharded, {.lr = 0.02});
    Ema ema(sharded, 0.5);
    loss_of(net, 0, 0, 8).backward();
    EXPECT_TRUE(optimizer.step());
    ema.update();
    auto copy = fully_shard(other, mesh_for(world, zero3()), {.placements = zero3(), .layouts = {{"*", block(3)}}});
    AdamW others(copy, {.lr = 0.02});
    sharded.copy_to(copy);
    const auto state = full_state(sharded, optimizer);
    load_full_state(copy, others, state);
    const auto again = full_state(copy, others);
    std::map<std::string, Tensor> copied;
    for (const auto& [name, value] : copy.full_parameters()) copied[name] = value;
    for (const auto& [name, value] : sharded.full_parameters()) EXPECT_TRUE(torch::equal(value, copied.at(name))) << name;
    for (const auto& [name, kept] : state)
      EXPECT_TRUE(torch::equal(kept.tensors.at("exp_avg"), again.at(name).tensors.at("exp_avg"))) << name;
    for (const auto& [name, value] : ema.full()) EXPECT_EQ(value.sizes(), copied.at(name).sizes()) << name;
  });
}

TEST(Complex, OfTypesThatThereAreNot) {
  on_ranks(1, [](const World& world) {
    Waves net;
    const ShardOptions options{.precision = {.working = torch::kBFloat16}};
    expect_words(refusal<ConfigError>([&] { fully_shard(net, Mesh(world), options); }), {"'weight'", "complex", "BFloat16"});
  });
}

}  // namespace
}  // namespace tessera::test
