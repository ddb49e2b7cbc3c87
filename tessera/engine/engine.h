#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/gradient_hook.h"
#include "tessera/engine/join.h"
#include "tessera/engine/loss_scale.h"
#include "tessera/engine/module_buffers.h"
#include "tessera/engine/schedule.h"
#include "tessera/engine/unit.h"

namespace tessera {

/// What to do when a gradient is not finite. All ranks do the same.
enum class NonFinite : uint8_t {
  stop,  ///< throw NonFiniteError, which names step and parameter, before anything is updated
  skip,  ///< leave parameters and optimizer state as they are, count the step as skipped, say so on stderr
};

/// The further names of tied parameters, by the first.
using OtherNames = std::map<std::string, std::vector<std::string>>;

/// What moving state has cost this rank since the engine was made. Byte counts are those of the collectives' volume: what
/// came from peers, whether it was copied or is read in place.
struct Traffic {
  int64_t gathers = 0, reductions = 0;
  Bytes gathered, reduced;
  std::chrono::nanoseconds gather_wait{}, reduce_wait{};  ///< exposed: computation stood still
  std::chrono::nanoseconds consume{};                     ///< in the optimizer, fused reduction included
  Bytes peak_lent;                                        ///< most that was lent to peers at once
};

/// A parameter of a sharded model.
struct ParameterPlace {
  uint32_t unit;
  ParameterIndex parameter;

  bool operator==(const ParameterPlace&) const = default;
};

struct EngineSettings {
  Precision precision;
  NonFinite non_finite;
  double gradient_divisor;  ///< of the ranks' summed gradients
  std::optional<LossScale> loss_scale;
  std::function<void(UnitSpec&)> prepare;  ///< called before each unit is made: afterwards its parameters have their values
  std::vector<NamedParameter> ignored = {};  ///< parameters of the model that are in no unit
  OtherNames other_names = {};
  ParametersNow parameters_now = {};
};

/// Runs the units of one model: gathers what operators touch, releases it, hands gradients over and has them reduced, and
/// keeps all ranks in step. Two enums hold its state: the phase here, and each unit's residency.
class Engine final : public AccessHandler {
 public:
  /// Makes the units one after another.
  Engine(std::shared_ptr<Communicator> communicator, const EngineSettings& settings, std::vector<UnitSpec> units);
  ~Engine() override;

  Communicator& communicator() { return *communicator_; }
  const Precision& precision() const { return precision_; }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  const std::vector<NamedParameter>& ignored() const { return ignored_; }  ///< of the model, in no unit
  const OtherNames& other_names() const { return other_names_; }
  Phase phase() const { return phase_; }
  int64_t step() const { return step_; }        ///< the step that is being computed, from 1
  int64_t skipped() const { return skipped_; }  ///< steps skipped because of non-finite gradients
  Traffic traffic() const;
  std::string schedule() const;

  void before(std::span<const Access> accesses, std::string_view operation) override;
  void after(std::span<const Access> accesses, std::span<const c10::IValue> results, std::string_view operation) override;
  bool wants_results() const override { return watching_; }

  /// The optimizer whose `consume` gets the gradients. Without one, shards' .grad is set for any torch::optim optimizer.
  void attach(GradientConsumer* consumer);
  const GradientConsumer* consumer() const { return consumer_; }

  /// The next backward's gradients of this rank count as those of `count` samples (or tokens) of `total`; see
  /// Sharded::weight_by. Collective if `total` is 0.
  double weight_by(double count, double total);

  /// Before each backward of ranks with different numbers of batches; see Sharded::join. Collective.
  bool join(double samples, DivideBy divide_by);

  const LossScaler& loss_scaler() const { return scaler_; }
  /// Between steps only; the same on all ranks.
  void set_loss_scale_state(const LossScaleState& state);
  /// Backward comes through a loss that was multiplied by `scale`.
  void on_scaled_loss(double scale);

  /// Backwards until `end_accumulating` are not the last of their step.
  void begin_accumulating() { ++accumulating_; }
  void end_accumulating() { --accumulating_; }

  /// (Σ |gradient|^norm_type)^(1 / norm_type) over all parameters, or the largest |gradient| if that is infinite; the same
  /// on all ranks (collective). Clips to `max_norm` unless it is infinite: gradients times min(1, max_norm / (norm + 1e-6)),
  /// as torch::nn::utils::clip_grad_norm_.
  double clip_gradient_norm(double max_norm, double norm_type);

  /// Limits each element of the gradients to ±`limit`. Collective.
  void clip_gradient_values(double limit);

  /// The attached optimizer's step (collective). Returns whether the step was applied.
  bool run_step();
  /// A step whose update, `update`, is another optimizer's on the shards; `rates` must be the same on all ranks. Collective.
  /// Returns whether it was applied.
  bool run_step_of(const std::function<void()>& update, const std::vector<double>& rates = {});
  /// Drops the gradients of this step.
  void zero_grad();
  /// Detaches every unit and keeps what was written to parameters (collective if something was).
  void release_all();
  /// Keeps units gathered until as many calls of let_go; no backward and no step meanwhile.
  void hold(const std::vector<uint32_t>& units);
  void let_go(const std::vector<uint32_t>& units);
  /// Runs `body`, which may write to the units' parameters by any means, the same on all ranks; then they are kept, or, if
  /// it throws, dropped. Collective.
  void edit(const std::vector<uint32_t>& units, const std::function<void()>& body);
  /// As much of the next gathers as needs no waiting. Returns whether that was all.
  bool prefetch(const std::vector<uint32_t>& units);
  /// Detaches those that no scope holds.
  void release_units(const std::vector<uint32_t>& units);
  /// Publishes what an outside optimizer wrote to the shards, if that is still to be done.
  void settle();
  /// New values for parameters, whole and the same on all ranks. Collective.
  struct NewValues {
    uint32_t unit;
    ParameterIndex parameter;
    at::Tensor values;
  };
  void write(const std::vector<NewValues>& all);
  /// New values for this rank's parts of master parameters, or new reduced gradients (undefined: none), in the shape of the
  /// shard; all ranks name the same parameters. Ranks with the same part must give the same. Collective.
  void write_parts(const std::vector<NewValues>& all);
  /// Throws GuardError if this rank can't be given new values now: in backward, in a scope that keeps a unit gathered, or
  /// where a parameter was replaced.
  void refuse_new_values(const char* what) const;
  /// New values for parameters, the same ones on all ranks, none of which refuses: `write` gives each its part, by
  /// Unit::write_part, and throws on all ranks or on none; what it wrote before it threw stays. Collective.
  void write_in_pieces(const std::vector<ParameterPlace>& places, const std::function<void()>& write);
  void write_gradient_parts(const std::vector<NewValues>& all);
  /// The same with whole gradients, the same on all ranks.
  void write_gradients(const std::vector<NewValues>& all);
  /// Reduces what waits for that. This rank's part of each parameter's gradient is then its shard's .grad. Collective.
  void show_gradients();
  const ModuleBuffers* buffers() const { return buffers_.get(); }
  ModuleBuffers* buffers() { return buffers_.get(); }
  /// Takes over the values of parameters that were replaced since they were sharded. Collective.
  void adopt();
  /// Throws GuardError naming the first parameter that was replaced.
  void refuse_replaced() const;

  /// Reduced gradients of all parameters, full shape, in order of units; undefined where no rank had one (collective).
  std::vector<at::Tensor> full_gradients();

  /// Keeps `buffers` the same on all ranks from now on: at the end of each step.
  void keep_equal(std::unique_ptr<ModuleBuffers> buffers) { buffers_ = std::move(buffers); }

  /// While on: notes the first operator with a parameter whose result is not finite, as "operator of unit '…'".
  void watch_non_finite(bool on);
  const std::string& first_non_finite() const { return first_non_finite_; }

  void on_gradient(uint32_t unit, ParameterIndex parameter);

  /// See Sharded::on_reduced_gradient.
  void on_reduced_gradient(const std::string& pattern, ReducedGradientHook hook);

 private:
  Unit& unit_of(const Access& access) { return *units_[access.what->unit]; }
  // Without an optimizer of our own nobody would tell when the last micro-batch was: each is reduced.
  bool keeps_local_gradients(const Unit& unit) const {
    return accumulating_ > 0 && !unit.gradients_sharded() && consumer_ != nullptr;
  }
  void refuse_gradients_in_module() const;
  void refuse_step(const char* what) const;
  void make_clippable();
  bool updates_in_backward(const Unit& unit) const;
  template <class Predicate>
  bool any_unit(const Predicate& predicate) const {
    return std::any_of(units_.begin(), units_.end(), [&](const auto& unit) { return predicate(*unit); });
  }

  void enter_forward();
  void enter_backward();
  void expect_gradients();
  void say_that_gradients_add_up() const;
  void go_on_after_nested_backward();
  void end_backward();
  void end_outermost_backward();
  void refuse_unconsumed() const;
  void say_that_none_is_used() const;
  void refuse_other_tensors();
  void refuse_in_scope(const char* what) const;
  void refuse_in_backward(const std::string& what) const;
  bool stays(const Unit& unit) const;
  [[noreturn]] void refuse_unscaled(const std::string& parameter) const;
  void touch_units(std::span<const Access> accesses);
  void touch(Unit& unit, uint32_t index);
  void gather(uint32_t index);
  void release(uint32_t index);
  void keep_edit(Unit& unit);
  void begin_training_pass();
  void note(StepKind kind, uint32_t unit);

  void watch_gradients();
  void watch_missing_gradients();
  void on_missing_gradient(UnitParameter& parameter);
  int32_t take_looks();
  void refuse_hooks_with(const GradientConsumer* consumer) const;
  void call_gradient_hooks();
  void refuse_more_gradients();

  void sit_out();
  void refuse_if_sitting_out() const;
  void weigh(double weight);

  void sweep_gradients(Unit& unit);
  void start_another_round(uint32_t index, ParameterIndex p);
  void post(uint32_t index);
  void post_rest(bool keep_local);
  void serve_peers();
  void reduce(uint32_t index);
  void reduce_oldest();
  void reduce_replicated(GradientConsumer* consumer);
  void take_back_lent();
  void agree_on_values(const std::string& label, const std::vector<uint64_t>& hashes,
                       const std::function<std::string(size_t)>& name);
  void agree_on_values(const std::string& label, const std::vector<uint64_t>& hashes, const std::vector<NewValues>& of);
  void write_each(const std::vector<NewValues>& all, void (Unit::*write)(ParameterIndex, const at::Tensor&));
  void publish_written(const std::vector<ParameterPlace>& places);
  std::vector<at::Tensor> gradients_of_shards();
  void agree_on_parts(const std::string& label, const std::vector<NewValues>& all);
  void share_sums();
  void make_reduced();
  void hand_over(bool arrivals);
  void synchronise(bool keep_local = false);

  std::vector<uint64_t> replicas_to_compare() const;
  void refuse_drifted_replicas(const std::vector<std::string>& answers, size_t begin) const;
  void refuse_other_trainable() const;
  bool agree_on_step();
  bool agree_on_outside_step();
  void begin_outside_step();
  void note_changes();
  void tell_units_loss_scale();
  void finish_step(bool applied);

  std::shared_ptr<Communicator> communicator_;
  Precision precision_;
  NonFinite non_finite_;
  double scale_;  // of the ranks' summed gradients
  LossScaler scaler_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<NamedParameter> ignored_;
  OtherNames other_names_;
  ParametersNow parameters_now_;
  bool said_added_ = false;
  std::unique_ptr<ModuleBuffers> buffers_;
  GradientConsumer* consumer_ = nullptr;

  struct HookedParameters {
    std::vector<ParameterPlace> parameters;
    ReducedGradientHook hook;
  };
  std::vector<HookedParameters> hooks_;
  bool hooks_called_ = false;  // in this step

  Phase phase_ = Phase::idle;
  Schedule schedule_;
  std::vector<uint32_t> resident_;   // units with memory attached
  std::deque<uint32_t> to_reduce_;   // posted here, not reduced yet
  Bytes lent_;                       // of all units together
  std::vector<uint32_t> to_return_;  // reduced here, perhaps still read by peers
  int64_t step_ = 1;
  int64_t skipped_ = 0;
  int32_t rounds_ = 0;     // times that gradients were handed over since the last step
  int32_t backwards_ = 0;  // that brought gradients since the last step
  int accumulating_ = 0;
  bool training_pass_ = false;          // the present pass records gradients, so its steps belong to the schedule
  bool arrivals_ = false;               // some gradient came in this backward
  bool nested_ended_ = false;           // a backward inside the present one has ended
  bool local_pending_ = false;          // gradients of accumulated backwards lie in the module's tensors
  bool reduction_pending_ = false;      // posted, and left for the optimizer to reduce
  bool sums_pending_ = false;           // sharded gradients are summed, and not exchanged between the ranks of one part
  bool unconsumed_ = false;             // gradients wait for a step
  int dropped_ = 0;                     // times that they were dropped while no optimizer had ever used any
  bool departed_ = false;               // said once that an iteration departed from the schedule
  std::vector<bool> updated_anywhere_;  // by unit: some rank has a gradient for it in the step that was agreed on
  double weight_ = 1.0;                 // of this rank's gradients in the coming backward
  bool some_sit_out_ = false;           // some rank has no batch for the coming backward
  bool sits_out_ = false;               // this rank has no batch, and has done its part of this backward
  bool irregular_ = false;              // this step's order is not what the next one's is to be compared with
  std::vector<bool> took_part_;         // ranks that had a batch in this step; empty: all
  bool loss_was_scaled_ = false;        // of this backward
  bool watching_ = false;
  uint64_t outside_settings_ = 0;  // of the optimizers whose step is running, if they are not tessera's
  int64_t spoilt_in_ = 0;          // the step in which an outside optimizer took in gradients that are not finite, or 0
  std::string first_non_finite_;
  Traffic traffic_;
  int unwinding_ = 0;
  std::shared_ptr<Engine*> self_ = std::make_shared<Engine*>(this);  // null once it is gone, for shards that outlive it
};

}  // namespace tessera
