#include "tessera/base/suggest.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera {
namespace {

const std::vector<std::string> kOptions{"--layers",     "--width", "--heads", "--kv-heads",
                                        "--accumulate", "--lr",    "--ranks", "--steps"};

TEST(Suggest, DistanceCountsEdits) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("tarin", "train"), 1u);
  EXPECT_EQ(edit_distance("train", "train"), 0u);
}

TEST(Suggest, FindsTheNearestName) {
  EXPECT_EQ(nearest("--layer", kOptions), "--layers");
  EXPECT_EQ(nearest("--lyaers", kOptions), "--layers");
  EXPECT_EQ(nearest("widht", kOptions), "--width");
  EXPECT_EQ(nearest("--KV_HEADS", kOptions), "--kv-heads");
  EXPECT_EQ(nearest("--kvheads", kOptions), "--kv-heads");
  EXPECT_EQ(nearest("--head", kOptions), "--heads");
  EXPECT_EQ(nearest("-lr", kOptions), "--lr");
}

TEST(Suggest, TakesAbbreviations) { EXPECT_EQ(nearest("--acc", kOptions), "--accumulate"); }

TEST(Suggest, SaysNothingWhenNothingIsNear) {
  EXPECT_EQ(nearest("--momentum", kOptions), std::nullopt);
  EXPECT_EQ(nearest("--", kOptions), std::nullopt);
  EXPECT_EQ(nearest("", kOptions), std::nullopt);
  EXPECT_EQ(nearest("--layers", {}), std::nullopt);
}

TEST(Suggest, MakesTheEndOfASentence) {
  EXPECT_EQ(did_you_mean("--step", kOptions), "; did you mean '--steps'?");
  EXPECT_EQ(did_you_mean("--momentum", kOptions), "");
}

}  // namespace
}  // namespace tessera
