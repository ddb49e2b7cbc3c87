#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/fully_shard.h"
#include "tessera/storage/private_buffer.h"

namespace tessera {

/// As torch::optim::AdamW's options. With `fused_reduction`, the optimizer reads the ranks' gradients itself and updates in
/// the same pass: in backward, a unit at a time, where gradients are sharded, else at step(). It saves writing and reading
/// the summed gradient. Then there is no gradient to clip or to look at, and a gradient that is not finite is an error found
/// after other parameters were updated.
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  bool fused_reduction = false;
  /// What the moments are kept in: the master parameters' type (fp32, or fp64 for fp64 models), or bf16: the update uses
  /// them whole, then they are rounded to nearest. Bf16 has 8 bits, so a second moment with beta2 = 0.999 hardly follows
  /// gradients that change slowly; runs with bf16 moments use 0.95.
  std::optional<c10::ScalarType> moments = {};
};

/// AdamW (Loshchilov & Hutter 2019, algorithm 2) on a sharded model's master parameters, in one pass over gradient, master
/// and both moments that writes the working parameters too. Moments take 8 bytes an element of this rank's part in fp32, 4
/// in bf16. Parameters that no rank had a gradient for are left alone, decay included. Attached to the model until
/// destroyed; one at a time.
class AdamW final : public GradientConsumer {
 public:
  /// Throws ConfigError for an option outside its range, SystemError if there is no memory for the moments.
  AdamW(const Sharded& sharded, const AdamWOptions& options);
  ~AdamW() override;
  AdamW(const AdamW&) = delete;
  AdamW& operator=(const AdamW&) = delete;

  /// Collective. Returns false if the step was skipped because a gradient was not finite (only with NonFinite::skip, or a
  /// loss scale that backs off).
  /// O(parameters / ranks).
  bool step() { return engine_->run_step(); }
  void zero_grad() { engine_->zero_grad(); }

  /// May be changed between steps (learning-rate schedules). `fused_reduction` and `moments` may not.
  AdamWOptions& options() { return options_; }

  SumResult consume(const GradientPiece& piece) override;
  uint64_t settings() const override;
  bool fuses_reduction() const override { return fused_; }
  int64_t bytes_per_element(uint32_t unit) const override { return 2 * units_[unit].element_size; }

  const Engine& engine() const { return *engine_; }
  /// What `full_state` and its like (optimizer_state.h) read and write: a parameter's moments on this rank, 1-D over the
  /// elements that it updates, in place; and how often it was updated, as far as this rank knows.
  struct Moments {
    at::Tensor exp_avg, exp_avg_sq;
    int64_t& updates;
  };
  Moments moments(uint32_t unit, ParameterIndex p);

 private:
  struct UnitState {
    // First moments, then second. Made at the first update: beside memory in use, huge pages would fill that of frozen
    // units.
    std::byte* bytes();

    PrivateBuffer moments;  // see bytes()
    int64_t elements = 0;
    c10::ScalarType type = c10::ScalarType::Float;  // of the moments
    int64_t element_size = 4;
    std::vector<std::pair<int64_t, int64_t>> steps;  // by parameter: updates so far, and the engine's step of the last
  };
  std::shared_ptr<Engine> engine_;
  AdamWOptions options_;
  const bool fused_;
  std::vector<UnitState> units_;
};

}  // namespace tessera
