// Loading takes no memory but one window of what is read.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/deferred_helpers.h"
#include "tests/support/on_ranks.h"
#include "tests/support/peak_memory.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/sharded_helpers.h"
#include "tests/support/test_folder.h"

namespace tessera::test {
namespace {

constexpr int64_t kMebi = int64_t{1} << 20;
constexpr int64_t kWidth = 2048;
constexpr int kLayers = 4;  // of 16 MiB
constexpr int64_t kWindow = 8 * kMebi, kSlack = 3 * kMebi;

TEST(LoadMemory, IsOneWindow) {
  const TestFolder folder;
  std::map<std::string, torch::Tensor> tensors;
  for (int i = 0; i < kLayers; ++i) tensors[std::to_string(i)] = torch::full({kWidth, kWidth}, i + 0.5);
  write_safetensors(folder.file("x"), tensors);
  tensors.clear();
  for_every_placement(
      [&](const World& world, const Placements& placements) {
        for (const auto& layout : {flat(), per_parameter(1)})
          for (const auto type : {torch::kFloat, torch::kBFloat16}) {
            const auto net = filled([](FilledImpl& filled) {
              for (int i = 0; i < kLayers; ++i) filled.parameter(std::to_string(i), torch::zeros({kWidth, kWidth}));
            })();
            ShardOptions options{.placements = placements, .layouts = {{"*", layout}}};
            options.precision.working = type;
            auto sharded = fully_shard(*net, mesh_for(world, placements), options);
            const int64_t peak = peak_of([&] { load_at_once(sharded, folder.file("x")); });
            EXPECT_LT(peak, kWindow + kSlack) << name_of(layout) << c10::toString(type);
            EXPECT_EQ(net->parameters()[3].mean().item<double>(), 3.5);
          }
      },
      {2});
}

}  // namespace
}  // namespace tessera::test
