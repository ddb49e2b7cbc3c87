// Fifty steps of a small Llama: every placement on every number of ranks against the unsharded run, and bit by bit against
// each other.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "models/llama.h"
#include "models/synthetic_data.h"
#include "tessera/base/text.h"
#include "tessera/tessera.h"
#include "tests/support/on_ranks.h"
#include "tests/support/sharded_helpers.h"
#include "tests/support/shared_array.h"

namespace tessera::test {
namespace {

using models::Llama;
using models::LlamaConfig;
using torch::Tensor;

constexpr int kSteps = 50;
constexpr int64_t kSamples = 12;  // of all ranks together, so that 1 to 4 ranks have equal parts
const LlamaConfig kModel = {.layers = 2, .width = 64, .heads = 4, .kv_heads = 2, .hidden = 176, .vocab = 256, .context = 16};
const AdamWOptions kAdamW = {.lr = 1e-3, .weight_decay = 0.1};

Llama new_model() {
  torch::manual_seed(7);
  return Llama(kModel);
}

const models::SyntheticData& data() {
  static const models::SyntheticData data(kModel.vocab, kModel.context, /*seed=*/3);
  return data;
}

/// What a run leaves for the process that started its ranks: each rank's losses and parameters, in memory that all share.
struct Outcome {
  explicit Outcome(int ranks)
      : ranks(ranks),
        losses(static_cast<size_t>(kSteps * ranks)),
        parameters(static_cast<size_t>(ranks * kModel.parameters())) {}

  void keep(int rank, const std::vector<double>& rank_losses, const std::vector<Tensor>& values) {
    std::copy(rank_losses.begin(), rank_losses.end(), losses.data() + rank * kSteps);
    float* to = parameters.data() + rank * kModel.parameters();
    for (const auto& value : values) {
      const Tensor floats = value.detach().to(torch::kFloat).contiguous();
      to = std::copy_n(floats.const_data_ptr<float>(), floats.numel(), to);
    }
    EXPECT_EQ(to - parameters.data(), (rank + 1) * kModel.parameters());
  }
  double loss(int step) const {
    double sum = 0;
    for (int r = 0; r < ranks; ++r) sum += losses.data()[r * kSteps + step];
    return sum / ranks;
  }
  const float* of(int rank) const { return parameters.data() + rank * kModel.parameters(); }
  bool same_bits(int rank, const Outcome& other) const {
    return std::memcmp(of(rank), other.of(0), static_cast<size_t>(kModel.parameters()) * sizeof(float)) == 0;
  }

  int ranks;
  SharedArray<double> losses;
  SharedArray<float> parameters;
};

/// The plain run of the same steps: each rank's samples by themselves, their gradients' mean, and libtorch's AdamW.
Outcome unsharded(int ranks) {
  Outcome outcome(1);
  on_ranks(1, [&](World) {
    Llama model = new_model();
    torch::optim::AdamW optimizer(model->parameters(),
                                  torch::optim::AdamWOptions(kAdamW.lr).weight_decay(kAdamW.weight_decay));
    std::vector<double> losses;
    for (int step = 0; step < kSteps; ++step) {
      double mean = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const Tensor loss = model->loss(data().batch(step, Rank(rank), ranks, kSamples / ranks));
        mean += loss.item<double>() / ranks;
        loss.backward();
      }
      for (auto& parameter : model->parameters()) parameter.mutable_grad().mul_(1.0 / ranks);
      optimizer.step();
      optimizer.zero_grad();
      losses.push_back(mean);
    }
    outcome.keep(0, losses, model->parameters());
  });
  return outcome;
}

struct Variant {
  Placements placements;
  bool fused = false;
  Precision precision = {};
  LayoutKind layout = flat();
};
const Precision kBf16 = {.working = torch::kBFloat16, .gradient = {}};

Outcome sharded(int ranks, const Variant& variant) {
  Outcome outcome(ranks);
  on_ranks(ranks, [&](World world) {
    Llama model = new_model();
    std::vector<std::string> order;
    for (const auto& item : model->named_parameters()) order.push_back(item.key());
    auto sharded = fully_shard(model, mesh_for(world, variant.placements),
                               {.placements = variant.placements,
                                .units = units_of<models::LlamaBlockImpl>(),
                                .layouts = {{"*", variant.layout}},
                                .precision = variant.precision});
    auto options = kAdamW;
    options.fused_reduction = variant.fused;
    AdamW optimizer(sharded, options);
    std::vector<double> losses;
    for (int step = 0; step < kSteps; ++step) {
      const Tensor loss = model->loss(data().batch(step, world.rank, world.size, kSamples / world.size));
      losses.push_back(loss.item<double>());
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    std::map<std::string, Tensor> whole;
    for (auto& [name, value] : sharded.full_parameters()) whole[name] = value;
    std::vector<Tensor> values;
    for (const auto& name : order) values.push_back(whole.at(name));
    outcome.keep(world.rank.value, losses, values);
  });
  return outcome;
}

void expect_equal_to_unsharded(const Outcome& run, const Outcome& plain) {
  for (int step = 0; step < kSteps; ++step)
    EXPECT_NEAR(run.loss(step), plain.loss(step), 1e-6 * plain.loss(step)) << "step " << step + 1;
  float largest = 0, difference = 0;
  for (int64_t i = 0; i < kModel.parameters(); ++i) {
    largest = std::max(largest, std::abs(plain.of(0)[i]));
    difference = std::max(difference, std::abs(run.of(0)[i] - plain.of(0)[i]));
  }
  EXPECT_LE(difference, 1e-6 * largest);
}

class ParityLlama : public testing::TestWithParam<int> {};

TEST_P(ParityLlama, EveryPlacementIsTheUnshardedRunAndBitEqualToTheOthers) {
  const int ranks = GetParam();
  const Outcome plain = unsharded(ranks), first = sharded(ranks, {ddp()});
  EXPECT_LT(plain.loss(kSteps - 1), plain.loss(0) - 0.5) << "nothing was learnt that could differ";
  expect_equal_to_unsharded(first, plain);
  for (const auto& placements : every_placement())
    for (const bool fused : {false, true}) {
      SCOPED_TRACE(text(name_of(placements), fused ? ", fused" : "", " on ", ranks, " ranks"));
      const Outcome run = sharded(ranks, {placements, fused});
      for (int rank = 0; rank < ranks; ++rank) EXPECT_TRUE(run.same_bits(rank, first)) << "rank " << rank;
      for (int step = 0; step < kSteps; ++step) EXPECT_EQ(run.loss(step), first.loss(step)) << "step " << step + 1;
      if (HasFailure()) return;  // forked ranks would inherit it
    }
}

TEST_P(ParityLlama, EveryLayoutHasTheSameBits) {
  const int ranks = GetParam();
  const Outcome first = sharded(ranks, {zero3()});
  for (const auto& placements : {zero1(), zero3(), hybrid("shard", "replicate", true)})
    for (const auto& layout : {per_parameter(), per_parameter(1), block(100), whole_parameters()}) {
      SCOPED_TRACE(text(name_of(placements), ", ", name_of(layout), " on ", ranks, " ranks"));
      const Outcome run = sharded(ranks, {placements, ranks > 2, {}, layout});
      for (int rank = 0; rank < ranks; ++rank) EXPECT_TRUE(run.same_bits(rank, first)) << "rank " << rank;
      if (HasFailure()) return;
    }
}

TEST_P(ParityLlama, Bf16WorkingParametersAreCloseToFp32AndTheSameOnAllRanks) {
  const int ranks = GetParam();
  const Outcome floats = sharded(ranks, {zero3()}), first = sharded(ranks, {ddp(), false, kBf16});
  for (const auto& placements : every_placement())
    for (const bool fused : {false, true}) {
      SCOPED_TRACE(text(name_of(placements), fused ? ", fused" : "", " on ", ranks, " ranks"));
      const Outcome run = sharded(ranks, {placements, fused, kBf16});
      for (int step = 0; step < kSteps; ++step) EXPECT_NEAR(run.loss(step), floats.loss(step), 0.02) << "step " << step + 1;
      for (int rank = 1; rank < ranks; ++rank)
        EXPECT_TRUE(run.same_bits(rank, run)) << "rank " << rank << " has other parameters than rank 0";
      // A fused update takes the sums before they are rounded to bf16, so it need not have these bits.
      EXPECT_TRUE(fused || run.same_bits(0, first));
      if (HasFailure()) return;
    }
}

TEST_P(ParityLlama, Bf16WithFp32GradientsIsCloseToFp32) {
  const int ranks = GetParam();
  const Outcome floats = sharded(ranks, {zero3()});
  for (const auto& placements : {zero2(), zero3()}) {
    const Outcome run = sharded(ranks, {placements, false, {.working = torch::kBFloat16, .gradient = torch::kFloat}});
    for (int step = 0; step < kSteps; ++step)
      EXPECT_NEAR(run.loss(step), floats.loss(step), 0.02) << name_of(placements) << ", step " << step + 1;
    for (int rank = 1; rank < ranks; ++rank) EXPECT_TRUE(run.same_bits(rank, run)) << "rank " << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ParityLlama, testing::Values(1, 2, 3, 4), testing::PrintToStringParamName());

}  // namespace
}  // namespace tessera::test
