#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/agreement.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/module_tree.h"
#include "tessera/layout/placements.h"
#include "tessera/mesh/mesh.h"

namespace tessera {

/// The layout of parameters whose full name matches `pattern` (fnmatch: `*` any characters, `?` one, `[…]` a set).
struct LayoutChoice {
  std::string pattern;
  LayoutKind layout;
};

/// What becomes of a unit's parameters between its forward and its backward.
struct ReshardAfterForward {
  constexpr ReshardAfterForward(bool release) : release(release) {}  // NOLINT(google-explicit-constructor): reads as FSDP2's
  ReshardAfterForward(std::string axis) : axis(std::move(axis)) {}   // NOLINT(google-explicit-constructor)
  ReshardAfterForward(const char* axis) : axis(axis) {}              // NOLINT(google-explicit-constructor)

  bool release = true;    ///< false: they stay gathered until backward has used them
  std::string axis = {};  ///< see ShardOptions
};

struct ShardOptions {
  Placements placements = zero3();
  UnitPolicy units = nullptr;              ///< default: the whole model is one unit
  std::vector<LayoutChoice> layouts = {};  ///< the first that matches a parameter counts; flat() for those that none matches
  /// Units whose names match one of these patterns are one unit, under the name of the first.
  std::vector<std::string> joined = {};
  /// Parameters that match one of these patterns stay as they are: whole on every rank, their gradients not reduced.
  std::vector<std::string> ignored = {};
  /// true: units are released after forward, and gathered again in backward. false: they stay. The name of an axis of a mesh
  /// with two, for zero3: they are kept along that axis after forward, so that the gathers of backward stay inside such a
  /// group (the secondary partition of ZeRO++, Wang et al. 2023, section 3.2); every group holds a copy of the parameters.
  ReshardAfterForward reshard_after_forward = true;
  /// Parameters with fewer elements than this are whole on every rank, where parameters are sharded, and are gathered once a
  /// step; their gradients and optimizer state stay sharded. They are one unit, "(resident)" (ZeRO's persistence threshold).
  int64_t resident_below = 0;
  /// Units whose names match one of these patterns stay gathered from forward to backward in any case; "(root)" is the root.
  std::vector<std::string> kept = {};
  Precision precision = {};
  Initial initial = Initial::verify;
  Buffers buffers = Buffers::average;
  NonFinite non_finite = NonFinite::stop;
  /// For fp16: the loss is scaled (Sharded::scale), and everything from the reduced gradients on is unscaled again.
  std::optional<LossScale> loss_scale = {};
  /// What the sum of the ranks' gradients is divided by; default: the number of ranks, so that gradients are means.
  std::optional<double> gradient_divisor = {};
};

/// Bytes of model state that this rank holds. `padding` is not counted in the others.
struct StateBytes {
  double parameters = 0, gradients = 0, optimizer = 0, padding = 0, communication_buffers = 0;
};

class ArenaLease;

/// A model whose state is sharded. The module itself stays usable as before: operators that touch its parameters gather them
/// first. Not thread-safe: forward, backward and step are called from one thread. Must be destroyed after its optimizer.
class Sharded {
 public:
  Sharded(std::shared_ptr<Engine> engine, std::shared_ptr<ArenaLease> arena);

  /// This rank's parts of the master parameters, in a fixed order that is the same on all ranks: 1-D unless the part is the
  /// whole parameter; empty where this rank owns nothing. Complex parameters are pairs of reals here, with one more dim
  /// (view_as_real), as torch::optim treats them. After backward their .grad is the mean over ranks, and what it holds
  /// counts for every optimizer: it may be changed in place (by operators: norms follow those alone), replaced or dropped.
  /// For any optimizer that treats elements one by one, as all of torch::optim do but LBFGS; what combines elements over
  /// ranks, such as a norm, must not be computed from one rank's shards: use clip_grad_norm.
  std::vector<at::Tensor> parameters() const;
  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const;

  /// Clips the gradients' global norm, (Σ |gradient|^norm_type)^(1 / norm_type), or the largest |gradient| if that is
  /// infinite, to `max_norm`; returns the norm before, the same number on all ranks. Collective. Call between backward and
  /// step. Throws ConfigError if the optimizer takes gradients as they are reduced.
  double clip_grad_norm(double max_norm, double norm_type = 2) { return engine_->clip_gradient_norm(max_norm, norm_type); }
  /// Limits every element of the gradients to [−limit, limit]. Otherwise as clip_grad_norm.
  void clip_grad_value(double limit) { engine_->clip_gradient_values(limit); }
  double grad_norm(double norm_type = 2) { return clip_grad_norm(std::numeric_limits<double>::infinity(), norm_type); }

  /// Calls `hook(name, gradient)` for each parameter whose full name matches `pattern` (fnmatch) and that has a gradient,
  /// once a step: when the step's gradients are first looked at after the last backward, by step, clip_grad_norm, grad_norm,
  /// clip_grad_value or full_gradients. `gradient` is this rank's part of the reduced gradient, in the shape of the shard,
  /// empty where this rank has none, and may be changed in place; where several ranks hold the same part (ddp, hybrid) they
  /// must change it alike. Hooks of one parameter are called in the order of registration. (tensor.register_hook on the
  /// module's own parameter sees this rank's gradient before the reduction.) Throws ConfigError if nothing matches, or if
  /// the optimizer takes gradients as they are reduced.
  void on_reduced_gradient(const std::string& pattern, ReducedGradientHook hook) {
    engine_->on_reduced_gradient(pattern, std::move(hook));
  }

  void zero_grad() { engine_->zero_grad(); }

  /// For ranks with different numbers of samples (or tokens) whose losses are means over their own: the next backward's
  /// gradients become the mean over all samples, instead of the mean of the ranks' means. `count`: this rank's samples.
  /// `total`: those of all ranks, and of all micro-batches of the step; 0 means one micro-batch, and sums the ranks' counts
  /// (then collective). Returns this rank's factor, count · ranks / total: the mean over ranks of factor · loss is the loss
  /// over all samples.
  double weight_by(double count, double total = 0) { return engine_->weight_by(count, total); }

  /// For ranks with different numbers of batches: is there still a rank that has one? Every rank calls it before each
  /// forward, and says whether it has a batch; all go on until none has. A rank without takes part in this backward here,
  /// without gradients, waiting for those of the others; it skips forward and backward, and calls what follows them as all
  /// ranks do:
  ///
  ///     while (sharded.join(batch.has_value())) {
  ///       if (batch) loss(*batch).backward();
  ///       sharded.clip_grad_norm(1.0);
  ///       optimizer.step();
  ///       optimizer.zero_grad();
  ///       batch = loader.next();
  ///     }
  ///
  /// With micro-batches it is called for each, under accumulating() where the backward would be. Buffers are those of the
  /// ranks that had a batch in the step. Throws GuardError when a rank that said it had no batch trains on one,
  /// AgreementError where `divide_by` differs. Collective.
  bool join(bool has_batch, DivideBy divide_by = DivideBy::ranks) { return engine_->join(has_batch ? 1 : 0, divide_by); }

  /// The same for losses that are means over `samples` samples (or tokens), 0 where there is none: the gradients of this
  /// backward become the mean over all of them. Instead of join and weight_by, for the ranks that have run out don't get to
  /// a weight_by that follows.
  bool join_by(double samples) { return engine_->join(samples, DivideBy::samples); }
  /// `loss` (a scalar of any floating type) times the loss scale, in fp32 at least: what backward is called on. Without
  /// ShardOptions::loss_scale, `loss` itself. All ranks have the same scale; gradients, their norm and what optimizers see
  /// are of the unscaled loss; only gradients of ignored parameters stay as backward made them. With a loss scale, a
  /// backward whose loss did not go through here throws GuardError, and one whose loss was scaled before the scale changed.
  at::Tensor scale(const at::Tensor& loss) const;
  double loss_scale() const { return engine_->loss_scaler().scale(); }  ///< 1 without ShardOptions::loss_scale
  /// For checkpoints. Setting is for between a step and the next backward, the same on all ranks (a difference is an
  /// AgreementError at the next step); throws ConfigError for a state that the options don't allow.
  LossScaleState loss_scale_state() const { return engine_->loss_scaler().state(); }
  void set_loss_scale_state(const LossScaleState& state) { engine_->set_loss_scale_state(state); }
  int64_t skipped_steps() const { return engine_->skipped(); }  ///< because of gradients that were not finite

  /// One step of other optimizers than tessera's over parameters(): calls each one's step(), unless a gradient is not finite
  /// on any rank and that is to be skipped (NonFinite::skip, or a loss scale that can back off); then nothing changes, and
  /// false is returned. Throws AgreementError where ranks have different learning rates. Optimizers that are stepped
  /// directly throw instead of skipping, on all ranks. A rank whose backward brought no gradient takes part with none;
  /// stepped directly, its optimizer would do nothing, and the next step throws AgreementError on all ranks. Collective.
  template <class... Optimizers>
  bool step(Optimizers&... optimizers) {
    std::vector<double> rates;
    const auto add_rates = [&rates](auto& optimizer) {
      if constexpr (requires { optimizer.param_groups(); })
        for (auto& group : optimizer.param_groups()) try {
            rates.push_back(group.options().get_lr());
          } catch (const c10::Error&) {  // options of the caller's own, without one
          }
    };
    (add_rates(optimizers), ...);
    return engine_->run_step_of([&] { (static_cast<void>(optimizers.step()), ...); }, rates);
  }

  /// While the result lives, a backward is not the last of its step: gradients add up (in the shards where gradients are
  /// sharded, else on each rank, unreduced), and the next forward may follow without an optimizer step.
  class Accumulating {
   public:
    explicit Accumulating(Engine& engine) : engine_(&engine) { engine.begin_accumulating(); }
    ~Accumulating() { engine_->end_accumulating(); }
    Accumulating(const Accumulating&) = delete;
    Accumulating& operator=(const Accumulating&) = delete;

   private:
    Engine* engine_;
  };
  [[nodiscard]] Accumulating accumulating() { return Accumulating(*engine_); }

  /// Copies of the whole parameters in the type that the module computes with, and of the whole reduced gradients (undefined
  /// where no rank had one) in precision.gradient, or fp32 where that is fp16 and the loss is scaled; tied ones under their
  /// first names. Ignored parameters are not among them. The latter is collective. O(model) memory.
  std::vector<std::pair<std::string, at::Tensor>> full_parameters() const;
  std::vector<std::pair<std::string, at::Tensor>> full_gradients() const;

  /// Replaces whole parameters by name; the same values on all ranks, of any floating type, of which the master parameters
  /// keep all digits. Tied parameters may come under any or all of their names, ignored ones may come too. `strict`: throws
  /// ConfigError listing all names that are missing, unknown, or of another shape; otherwise missing ones keep their values.
  /// Nothing is written when it throws. Collective.
  void load_parameters(const std::vector<std::pair<std::string, at::Tensor>>& values, bool strict = true);

  /// The same for this rank's parts of master parameters (as named_parameters shows them), by name; those that are not named
  /// keep their values. Ranks that have the same part must give the same. Collective.
  void load_local_parameters(const std::vector<std::pair<std::string, at::Tensor>>& values);

  /// Copies of this rank's parts of the reduced gradients, in the shape of the shards and the type of the master parameters,
  /// undefined where no rank had one. Collective. Throws ConfigError if the optimizer takes gradients as they are reduced.
  std::vector<std::pair<std::string, at::Tensor>> local_gradients() const;
  /// Replace the reduced gradients of these names, whole (the same on all ranks) or this rank's parts, in any floating type;
  /// an undefined tensor: no gradient. Between backward and step. Throws as local_gradients, and ConfigError naming the
  /// parameter for an unknown or frozen one, or another shape. Collective.
  void load_gradients(const std::vector<std::pair<std::string, at::Tensor>>& values);
  void load_local_gradients(const std::vector<std::pair<std::string, at::Tensor>>& values);

  /// What holds a value for each element of a parameter, whole, from each rank's part of it in the shape of the shard (of
  /// parameters(), or the state that an optimizer keeps for it); and this rank's part of a whole. full_of is collective.
  at::Tensor full_of(const std::string& name, const at::Tensor& part) const;
  at::Tensor local_of(const std::string& name, const at::Tensor& whole) const;

  /// Gives another sharded model of the same names, shapes and ranks, whatever its placements, layouts and types, this
  /// one's master parameters with all their digits, and this one's buffers and ignored parameters: `fully_shard` a second
  /// instance of the module, then copy. Throws ConfigError naming what differs; then nothing is copied. Collective. O(one
  /// unit) memory.
  void copy_to(Sharded& other) const;

  /// After torch::load into the module, or whatever else gave parameters other memory (set_data): takes over their values,
  /// which must be the same on all ranks. Collective.
  void adopt() { engine_->adopt(); }

  /// While the result lives, the units whose names match the pattern ("(root)" is the root) are gathered: their parameters
  /// can be read by any means, also through their addresses. No backward and no step meanwhile. Its end throws GuardError if
  /// something else than an operator wrote to them. O(bytes of the units).
  class Gathered {
   public:
    Gathered(Engine& engine, std::vector<uint32_t> units);
    ~Gathered() noexcept(false);
    Gathered(const Gathered&) = delete;
    Gathered& operator=(const Gathered&) = delete;

   private:
    Engine* engine_;
    std::vector<uint32_t> units_;
    std::vector<std::vector<uint64_t>> hashes_;  // by unit and parameter, at the start
    int exceptions_;
  };
  [[nodiscard]] Gathered gathered(const std::string& units = "*") const;

  /// Gathers the units whose names match and runs `body`, which may write to their parameters by any means, also through
  /// their addresses, the same on all ranks. What it wrote to them is kept, in the master parameters too; if `body` throws,
  /// that is dropped on this rank. Throws AgreementError naming the parameter if ranks wrote differently; then the unit
  /// keeps its values. Collective.
  void edit(const std::string& units, const std::function<void()>& body);

  /// Does of the next gather of these units what needs no waiting for peers. Returns whether that was that.
  bool prefetch(const std::string& units = "*");

  /// Detaches the units whose names match, and which no scope keeps; what operators wrote to parameters is kept (then
  /// collective).
  void release(const std::string& units = "*");

  /// The recorded order of gathers, releases and reductions, a line each.
  std::string schedule() const { return engine_->schedule(); }

  /// `optimizer_bytes_per_element`: of optimizers other than tessera::AdamW, which is asked itself.
  StateBytes state_bytes(int64_t optimizer_bytes_per_element = 0) const;
  /// The most that this rank will hold of the model's state at once in a step, known before the first. Neither recomputation
  /// nor reshard_after_forward changes it on one host, where gathered parameters are read in place.
  PeakBytes predicted_peak(int64_t optimizer_bytes_per_element = 0) const;
  int64_t parameter_count() const;  ///< elements of all parameters of the model, each counted once
  Engine& engine() const { return *engine_; }
  const std::shared_ptr<Engine>& shared_engine() const { return engine_; }

 private:
  std::shared_ptr<ArenaLease> arena_;  // outlives the engine
  std::shared_ptr<Engine> engine_;
};

/// Shards `module`'s parameters, gradients and optimizer state over the ranks of `mesh`, as `options.placements` says.
/// Collective. The module keeps its tensors, which from now on view sharded storage. A module that was built under Deferred
/// gets its values here, a unit at a time; its buffers too. Throws ConfigError for a model without parameters, a unit policy
/// that matches nothing, a module that is sharded already, parameters that share memory without being the same tensor;
/// AgreementError where ranks differ; SystemError with both numbers where memory does not suffice. All but a SystemError
/// that names a unit's memory come before the module is touched; after that one, discard the module.
Sharded fully_shard(torch::nn::Module& module, const Mesh& mesh, const ShardOptions& options = {});

template <class Impl>
Sharded fully_shard(torch::nn::ModuleHolder<Impl>& holder, const Mesh& mesh, const ShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*holder), mesh, options);
}

/// The same for a TorchScript module, as torch::jit::load returns it. Its parameters' tensors are sharded where they are, so
/// all its methods, copies of the handle and modules inside it see them. Not for frozen modules, whose parameters have
/// become constants of the code.
Sharded fully_shard(torch::jit::Module& module, const Mesh& mesh, const ShardOptions& options = {});

}  // namespace tessera
