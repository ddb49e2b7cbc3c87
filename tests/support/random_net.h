#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace tessera::test {

/// What a random net may contain besides ordinary layers.
struct RandomNetOptions {
  torch::Dtype type = torch::kFloat;
  bool frozen = true;    ///< some parameters require no gradient
  bool optional = true;  ///< some stages can be left out in a pass
  int64_t most_stages = 7;
};

/// A small tree of modules, drawn from a seed: linear layers, norms, convolutions, attention, nested residual blocks (some
/// of which are recomputed in backward), an embedding that is the output's weight too, layers used twice, parameters used by
/// other modules or registered in two, parameters of one element, frozen and unused ones. The same seed gives the same net
/// with the same values.
class RandomNetImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kInputs = 5, kTokens = 7, kTargets = 3;

  RandomNetImpl(uint64_t seed, const RandomNetOptions& options);

  /// The loss of `rows` samples that are drawn from `seed`; bit i of `without` leaves the i-th optional stage out.
  torch::Tensor loss(uint64_t seed, int64_t rows, uint64_t without);

  /// The net's stages and frozen parameters, in words.
  std::string description() const;

  /// Parameters by name, each once.
  std::vector<std::pair<std::string, torch::Tensor>> unique_parameters() const;

 private:
  using Stage = std::function<torch::Tensor(const torch::Tensor&)>;

  int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  bool chance(double share) { return std::bernoulli_distribution(share)(random_); }
  std::string fresh_name(const std::string& kind) { return kind + std::to_string(names_++); }
  torch::nn::Linear new_linear(int64_t inputs, int64_t outputs);
  void add(const std::string& words, const Stage& stage, bool keeps_width = true);
  void add_random_stage();
  void add_linear();
  void add_convolution();
  void add_activation();
  template <class Part>
  void add_residual(const std::string& words, Part part);
  void add_borrowed();
  void freeze_some();

  std::mt19937_64 random_;
  int names_ = 0;
  bool optional_allowed_ = false;
  int64_t width_ = kInputs;
  std::vector<torch::nn::Linear> linears_;
  struct Step {
    Stage stage;
    int optional;  ///< its bit in `without`, or −1
  };
  std::vector<Step> steps_;
  int optionals_ = 0;
  std::string words_;
  torch::nn::Embedding embedding_{nullptr};
  torch::nn::Linear to_tokens_{nullptr}, head_{nullptr};
  torch::Dtype type_;
};
TORCH_MODULE(RandomNet);

}  // namespace tessera::test
