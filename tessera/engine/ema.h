#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/fully_shard.h"

namespace tessera {

/// The exponential moving average of a sharded model's parameters, kept as they are sharded: one value of the master
/// parameters' type for each element that this rank updates. It begins with the values at construction; buffers are not
/// averaged. Call `update` after each step that was applied:
///   tessera::Ema ema(sharded, 0.999);
///   if (optimizer.step()) ema.update();
///   ema.swap(); evaluate(model); ema.swap();
class Ema {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;

  /// Throws ConfigError unless 0 ≤ decay ≤ 1.
  Ema(const Sharded& sharded, double decay);

  /// average ← decay · average + (1 − decay) · parameter, in the arithmetic of torch.optim.swa_utils.get_ema_multi_avg_fn
  /// (lerp). Not collective. Throws GuardError while swapped. O(parameters / ranks).
  void update();
  int64_t updates() const { return updates_; }
  double decay() const { return decay_; }
  void set_decay(double decay);

  /// Exchanges averages and parameters; the second call restores both, without memory for a third copy. Collective. Throws
  /// GuardError if a step was made in between, which changed the averages.
  void swap();
  bool swapped() const { return swapped_; }
  /// The averages become the model's parameters, and stay. Collective. Throws GuardError while swapped.
  void copy_to_parameters();

  /// This rank's parts of the averages, in place; and the whole averages (collective; O(model) memory). By full name.
  Named local() const;
  Named full() const;
  /// Replaces averages of the names given (parts in the shape of the shard; whole values the same on all ranks), and the
  /// count of updates. Throws ConfigError for an unknown name or another shape; nothing is written then. Not collective.
  void load_local(const Named& values, int64_t updates = 0);
  void load_full(const Named& values, int64_t updates = 0);

 private:
  struct Average {
    ParameterPlace place;
    at::Tensor value;  // in the shape of the shard
  };
  void refuse_swapped(const char* what) const;
  void load(const Named& values, int64_t updates, bool whole);
  template <class Action>
  void write_by_unit(const Action& after);  // after(average, the parameters before)

  std::shared_ptr<Engine> engine_;
  double decay_;
  std::vector<Average> averages_;
  int64_t updates_ = 0;
  bool swapped_ = false;
  int64_t swapped_at_ = 0;  // the engine's step then
};

}  // namespace tessera
