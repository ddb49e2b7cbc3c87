#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/engine/gradient_consumer.h"
#include "tessera/engine/gradient_hook.h"
#include "tessera/engine/observer.h"
#include "tessera/engine/precision.h"
#include "tessera/layout/division.h"
#include "tessera/layout/layout.h"
#include "tessera/layout/partition_spec.h"
#include "tessera/layout/peak.h"
#include "tessera/layout/placements.h"
#include "tessera/storage/guarded_storage.h"
#include "tessera/storage/private_buffer.h"

namespace tessera {

/// A parameter's full dotted name and the module's own tensor.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

/// The parameters that a model has now, under each of their names; none if it is gone.
using ParametersNow = std::function<std::vector<NamedParameter>()>;

/// What is gathered together: parameters of one type from one part of the module.
struct UnitSpec {
  std::string name;
  std::vector<NamedParameter> parameters;
  Rule rule;
  /// The units that were asked for ("(root)" is the root) which the parameters lie in: one, unless small ones of several are
  /// kept together. Several of these may be of one asked-for unit, whose parameters differ in type or layout.
  std::vector<std::string> asked_for = {};
  bool kept_after_forward = false;  ///< stays gathered until backward has used it

  /// Does the pattern match its name, or an asked-for one?
  bool is_meant_by(const std::string& pattern) const;
};

std::vector<at::Tensor> tensors_of(const std::vector<NamedParameter>& named);

/// Where a unit's parameters are.
enum class Residency : uint8_t { sharded, gathering, resident };

/// A gradient as it was shown, not kept alive.
using ShownGradient = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// One parameter of a unit on this rank.
struct UnitParameter {
  std::string name;
  at::Tensor tensor;                       ///< the module's own: the working parameter
  at::Tensor shard;                        ///< this rank's part of the master parameter
  std::unique_ptr<GuardedStorage> memory;  ///< of `shard`
  Observed observed;                       ///< of `shard`
  std::vector<Run> summed;                 ///< elements whose gradient this rank sums
  std::vector<Run> updated;                ///< elements that this rank's optimizer updates
  at::Tensor taken;                        ///< this rank's gradient of this backward, not posted yet
  at::Tensor lent;                         ///< this rank's posted gradient, while peers may read it
  at::Tensor sum;             ///< for replicated gradients: the whole gradient, of which `summed` (later all) is reduced
  bool arrived = false;       ///< its gradient has come in this backward
  bool has_gradient = false;  ///< some rank had a gradient for it since the last step
  bool partial = false;       ///< it is reduced on this rank's `summed`, and not exchanged yet
  double squares = 0;         ///< Σ gradient² over `summed`
  /// The shard's .grad when it was last reduced, measured or changed here, and its version (of in-place operators) then.
  ShownGradient shown{at::Tensor().getIntrusivePtr()};
  int64_t shown_version = 0;
  int32_t looks = 0;  ///< times that .grad of the shard was asked for, and no parameter had any, since the step before

  /// The shard's .grad. Asked for so, it isn't taken for an optimizer's look.
  const at::Tensor& gradient() const { return shard.mutable_grad(); }
};

/// One unit's state on this rank and the ways to move it. Knows what to do, not when.
class Unit {
 public:
  Unit(UnitSpec spec, uint32_t index, const Precision& precision, Communicator& communicator, AccessHandler& handler);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& name() const { return name_; }
  bool is_meant_by(const std::string& pattern) const;  ///< as that of its UnitSpec
  const Layout& layout() const { return layout_; }
  const Placements& placements() const { return placements_; }
  const Division& division() const { return division_; }
  bool gradients_sharded() const { return placements_.gradient == Placement::sharded; }
  bool shares_sums() const { return division_.shares_sums(); }    ///< several ranks update the same elements
  c10::ScalarType working_type() const { return working_type_; }  ///< real
  c10::ScalarType gradient_type() const { return gradient_type_; }
  bool complex() const { return complex_; }            ///< its parameters are; here they are pairs of reals, in one more dim
  c10::ScalarType module_type() const;                 ///< of the module's parameters
  std::vector<int64_t> shape(ParameterIndex p) const;  ///< of the module's whole parameter
  std::vector<UnitParameter>& parameters() { return parameters_; }
  const std::vector<UnitParameter>& parameters() const { return parameters_; }
  bool trainable() const { return count_trainable() > 0; }  ///< has a parameter that requires a gradient now
  size_t count_trainable() const;                           ///< parameters that require a gradient now; O(parameters)

  // Parameters.
  Residency residency() const { return residency_; }
  /// Makes the module's parameters usable, as of this unit's epoch. Returns the time spent. Counts the bytes that came from
  /// peers.
  std::chrono::nanoseconds gather(int64_t step);
  void release();
  /// What of the next gather can be done without waiting. Returns whether nothing is left to wait for.
  bool prefetch();
  bool kept_after_forward() const { return kept_after_forward_; }
  /// Lets anyone write: on a copy of this rank's own.
  void begin_edit();
  bool edited() const { return edit_.data() != nullptr; }
  /// The owner's part of an edit becomes the new parameters. To be called between two barriers of all ranks.
  void keep_edit();
  void drop_edit();
  /// This rank's chunk holds the next epoch from now on.
  void publish_next_epoch();
  /// The parameters will change before they are used again; the next gather waits for that.
  void expect_next_epoch() { ++epoch_; }
  void publish_expected_epoch() {
    if (window_) window_->publish(epoch_);
  }
  /// Rounds the master shard into the working parameters, if they are of different types.
  void write_working_from_master();
  /// This rank's part of new values for parameter `p` (its shape, any floating type). To be called when nobody reads.
  void write_values(ParameterIndex p, const at::Tensor& values);
  /// The same for elements [first, first + values.numel()) of this rank's shard of it; for all of that shard; and for the
  /// reduced gradient of that (undefined: it has none).
  void write_part(ParameterIndex p, const at::Tensor& values, int64_t first);
  void write_shard(ParameterIndex p, const at::Tensor& values) { write_part(p, values, 0); }
  void write_gradient(ParameterIndex p, const at::Tensor& values);
  /// Was the module's tensor given other memory (set_data, as torch::load and Module::to do), shape or strides since it was
  /// sharded?
  bool replaced(ParameterIndex p) const;
  void take_back_tensor(ParameterIndex p);  ///< lets a replaced tensor view this unit's memory again
  /// Hashes of the parameters as they are here now, by parameter; for a resident unit.
  std::vector<uint64_t> hashes() const;

  // Gradients.
  /// Takes parameter `p`'s gradient, times `weight`, out of the module's tensor. To `keep` it in the master type is for more
  /// micro-batches that are added to it before it is handed over.
  void take_gradient(ParameterIndex p, double weight, bool keep = false);
  /// Micro-batches would lose small gradients if autograd added them up.
  bool working_type_is_narrow() const { return working_type_ != master_type_; }
  /// Reduced gradients are narrower than the shards' .grad, so those of several backwards are added up there.
  bool adds_up_where_shown() const { return gradient_type_ != master_type_; }
  /// Hands the taken gradients to the peers, in memory that they can read.
  void post();
  bool posted_by_all() const;
  std::chrono::nanoseconds wait_posted(int64_t step);
  std::chrono::nanoseconds wait_posted_politely(int64_t step);
  /// From now on gradients come times `scale`. All that leaves here (`.grad`, squares, what consumers get) is without it.
  void set_loss_scale(double scale);
  /// Sums the ranks' gradients over the owned elements, times `scale`: into the gradient shard, or into `consumer`.
  void reduce(double scale, GradientConsumer* consumer, int64_t step);
  /// Where several ranks update the same elements, they need each other's sums. For replicated gradients: waits for them,
  /// and takes them to this rank's memory or into `consumer`.
  std::chrono::nanoseconds gather_sums(GradientConsumer* consumer, double scale, int64_t step);
  /// The same for sharded gradients, in two halves, between barriers of all ranks.
  void offer_sums();
  void take_sums(int64_t step);

  // Shown gradients: what the shards' .grad holds, the user's changes included. All of these are for after the reduction.
  /// A shard's .grad, contiguous and in the master type (the same memory if it is so already); undefined if there is none.
  /// Throws GuardError if the user gave it another shape.
  at::Tensor shown_gradient(ParameterIndex p) const;
  /// Brings `squares` up to date where a .grad was changed, replaced or dropped. Throws as shown_gradient.
  void measure_changed();
  /// Throws GuardError naming the parameter if one has a .grad that came too late for a fused reduction.
  void refuse_changed(int64_t step) const;
  /// Σ |gradient|^exponent over the elements that this rank sums, the largest |gradient| if that is infinite.
  double power_of_gradient(ParameterIndex p, double exponent) const;
  void clamp_gradients(double limit);  ///< elements to ±`limit`
  void scale_gradients(double factor);
  /// Lets `change` see one, if it is there, and change it.
  void change_gradient(ParameterIndex p, const ReducedGradientHook& change);
  void consume_gradients(GradientConsumer& consumer, int64_t step);

  void drop_round() { exchange_->finish(round_); }  ///< this rank reads nothing of the posted round
  /// Lends no more, if all peers are done. Returns whether nothing is lent.
  bool take_back();
  std::chrono::nanoseconds wait_finished(int64_t step);
  void note_change();            ///< tells autograd that the parameters change in this step; once
  void forget_gradients();       ///< the step is over
  bool shows_gradients() const;  ///< some shard has a .grad
  bool any_gradient() const;     ///< from some rank's backward, or set here

  // Accounting, bytes.
  Bytes parameter_bytes() const;  ///< this rank's share of the working parameters
  Bytes gradient_bytes() const;   ///< of the gradient shard; 0 if frozen, or replicated: those stay where they grew
  Bytes optimizer_bytes(int64_t moments) const;   ///< of separate master weights, and of `moments` bytes an element
  Bytes staged_bytes() const { return staged_; }  ///< of gradients that were copied to where peers can read
  PeakBytes peak_bytes(int64_t moments) const;    ///< with all of this unit's gradients in flight
  int64_t updated_elements() const { return state_size_; }  ///< of this rank's packed shard, padding included
  /// Of this rank's part of the parameters, and of its shard: the fraction that belongs to parameters.
  double real_share_of_parameters() const;
  double real_share_of_shard() const;
  int64_t gathered_bytes = 0;  ///< that came from peers by gathers, ever
  int64_t reduced_bytes = 0;   ///< that came from peers by reductions, ever

  bool complete = false;                ///< all expected gradients of this backward are posted
  bool touched_after_complete = false;  ///< used in backward after that, here, since the last step
  bool posts_at_end = false;  ///< a step has shown that some rank does that: handed over at the end of backward from then on
  bool late = false;          ///< a gradient came in this backward after that
  bool shown = false;         ///< a backward of all ranks has shown whether it is touched after it was complete
  bool updated = false;       ///< its parameters changed when its gradients were reduced
  bool shard_written = false;  ///< an operator wrote to a shard since the last step
  int holders = 0;             ///< scopes that keep it gathered
  size_t arrivals = 0;         ///< gradients that came in this backward
  size_t expected = 0;         ///< gradients that can come in this backward
  bool expected_any = false;   ///< gradients could come in some backward since the last step
  Bytes lent;                  ///< in the posted round, until it is taken back

 private:
  void lay_out(UnitSpec& spec);
  void write_initial_values(const UnitSpec& spec);
  void make_shards(UnitSpec& spec);
  WindowPlan window_plan() const;
  at::Tensor readable_by_peers(const at::Tensor& gradient, ParameterIndex p);
  void keep_staged_sum(ParameterIndex p);
  std::byte* working_at(int64_t element) const { return working_ + element * layout_.element_size(); }
  std::byte* working_at(ParameterIndex p, const Run& run) const { return working_at(layout_.offset(p).value + run.begin); }
  std::byte* master_at(ParameterIndex p, const Run& run) const;
  template <class Action>
  void for_each_shown_sum(ParameterIndex p, const Action& action) const;  // action(elements of .grad, in fp64)
  template <class Action>
  void for_each_updated(const Action& action) const;  // action(p, run)
  void reduce_parameter(ParameterIndex p, const SumSources& from, double scale, GradientConsumer* consumer, int64_t step);
  void consume_sum(ParameterIndex p, GradientConsumer& consumer, int64_t step);
  void prepare_sum(ParameterIndex p, bool accumulate);
  /// Where reduced gradients begin: of the packed shard, or of the whole gradient. nullptr if there is none.
  std::byte* reduced(ParameterIndex p) const;
  /// How far from there a run lies, in bytes.
  int64_t reduced_distance(const Run& run) const { return (gradients_sharded() ? run.local : run.begin) * gradient_size_; }
  std::byte* reduced_at(ParameterIndex p, const Run& run) const { return reduced(p) + reduced_distance(run); }
  GradientPiece piece_of(ParameterIndex p, const Run& run, const SumSources& from, double scale, int64_t step,
                         bool leave_sum = false) const;
  template <class Action>
  void for_each_sum_of_peers(ParameterIndex p, const Action& action);  // action(run, its sum)
  double squares_of(const SumResult& kept) const;
  void measure(ParameterIndex p);
  bool shows_reduced(ParameterIndex p) const;  ///< .grad is the memory that gradients are reduced into
  bool changed_since_shown(ParameterIndex p) const;
  void note_shown(ParameterIndex p);
  /// What .grad holds becomes what further gradients are added to.
  void take_in_shown(ParameterIndex p, int64_t step);
  void refuse_change_of_partial(ParameterIndex p, int64_t step) const;
  void write_reduced(ParameterIndex p, const at::Tensor& values);
  void show_gradient(ParameterIndex p);
  void add_to_shown(ParameterIndex p);
  void consume_shown(ParameterIndex p, GradientConsumer& consumer, int64_t step);
  void show_gradient_anew(ParameterIndex p);
  at::Tensor reduced_shard(ParameterIndex p) const;

  std::string name_;
  std::vector<std::string> asked_for_;
  uint32_t index_;
  Placements placements_;
  Division division_;
  Communicator& communicator_;
  Observed observed_;
  Layout layout_;
  bool complex_ = false;
  c10::ScalarType working_type_, master_type_, gradient_type_;
  c10::ScalarType taken_type_;  // in which gradients are handed over: replicated ones are summed in place, so as the sum
  int64_t master_size_, gradient_size_, taken_size_;  // bytes an element
  std::vector<UnitParameter> parameters_;
  int64_t state_size_ = 0;  // elements of the packed shard that this rank updates

  std::unique_ptr<ParameterWindow> window_;  // none for a replicated optimizer
  PrivateBuffer replica_;                    // then the parameters are here
  std::byte* working_ = nullptr;
  PrivateBuffer master_;  // if of another type than working, or not in one piece there
  PrivateBuffer edit_;
  std::shared_ptr<std::byte> gradient_;      // the packed gradient shard, if gradients are sharded
  std::shared_ptr<std::byte> staging_area_;  // for gradients that did not grow where peers can read; as laid out
  std::shared_ptr<std::byte> sums_area_;     // for sums of those to which further backwards add
  double loss_scale_ = 1;                    // of the gradients that come
  double kept_scale_ = 1;                    // of the reduced ones in memory: the same for fp16, which they need it for
  Bytes staging_, staged_;                   // copied there in this round, and the most of any round
  std::unique_ptr<GradientExchange> exchange_;
  std::unique_ptr<GuardedStorage> storage_;
  Residency residency_ = Residency::sharded;
  bool kept_after_forward_;
  bool change_noted_ = false;
  uint32_t epoch_ = 1;
  uint32_t gathered_epoch_ = 0;
  uint32_t round_ = 0;
};

}  // namespace tessera
