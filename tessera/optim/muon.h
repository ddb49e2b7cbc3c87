#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/fully_shard.h"

namespace tessera {

/// As torch.optim.Muon's options (PyTorch 2.9 and later).
struct MuonOptions {
  enum class AdjustLr : uint8_t {
    original,         ///< lr · √max(1, rows/columns)  (Jordan 2024)
    match_rms_adamw,  ///< lr · 0.2 · √max(rows, columns), so that AdamW's lr and weight decay fit (Liu et al. 2025)
  };
  double lr = 1e-3;
  double weight_decay = 0.1;  ///< decoupled, times lr
  double momentum = 0.95;
  bool nesterov = true;
  std::array<double, 3> coefficients = {3.4445, -4.775, 2.0315};
  double eps = 1e-7;
  int iterations = 5;
  AdjustLr adjust_lr = AdjustLr::original;
  c10::ScalarType type = c10::ScalarType::BFloat16;  ///< that the iteration computes in
};

/// The nearest semi-orthogonal matrix to `matrix`, roughly (all singular values near 1): the quintic Newton–Schulz iteration
/// of Jordan 2024 ("Muon: an optimizer for hidden layers"). O(iterations · rows · columns · min(rows, columns)).
at::Tensor orthogonalised(const at::Tensor& matrix, const MuonOptions& options);

/// Muon on the matrices (parameters of two dims) of a model, sharded or not: momentum, orthogonalised, decoupled weight
/// decay. The update needs whole matrices, so their owner computes it: shard with `whole_parameters()` for them (ddp has
/// them whole anyway). Everything else belongs to another optimizer, over `other_parameters()`. State: one momentum an
/// element, in the master's type.
class Muon {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  /// Says which matrices it updates, by name; default: all. Embeddings and output layers usually belong to AdamW.
  using Choice = std::function<bool(const std::string& name)>;

  /// Throws ConfigError for an option outside its range, naming the parameter if this rank has only a part of a matrix, and
  /// where tessera::AdamW is attached, which updates all parameters.
  Muon(const Sharded& sharded, const MuonOptions& options = {}, const Choice& choice = nullptr);
  /// For a plain model's parameters.
  Muon(const Named& parameters, const MuonOptions& options = {}, const Choice& choice = nullptr);

  /// Updates from the shards' .grad, as torch::optim optimizers do; parameters without a gradient are left alone. Over
  /// shards call `sharded.step(muon)`: a rank that owns no matrix takes part in the step then.
  void step();
  void zero_grad();

  /// Full names of the matrices that it updates on any rank, and the momentum that this rank has of one, in place: the
  /// matrix's shape on its owner, undefined elsewhere.
  const std::vector<std::string>& names() const { return names_; }
  at::Tensor momentum(const std::string& name) const;

  /// The parameters, or shards, that this optimizer leaves alone.
  const std::vector<at::Tensor>& other_parameters() const { return others_; }
  MuonOptions& options() { return options_; }  ///< lr, weight_decay and momentum may be changed between steps

 private:
  struct Matrix {
    std::string name;
    at::Tensor values, momentum;
  };
  void take(const std::string& name, const at::Tensor& values, at::IntArrayRef shape, const Choice& choice);
  void check() const;

  MuonOptions options_;
  std::vector<std::string> names_;
  std::vector<Matrix> matrices_;  // of this rank
  std::vector<at::Tensor> others_;
};

}  // namespace tessera
