// What happens to operators in a Deferred scope, and to those that meet its tensors outside.
//
// An operator runs on twins of its arguments. Views are then made for real, of the storage without memory; anything else is
// put on the tape. One that draws random numbers runs once more, on values, to move the generator as construction would.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

#include <algorithm>
#include <array>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/deferred.h"
#include "tessera/engine/deferred_tape.h"
#include "tessera/engine/deferred_twins.h"
#include "tessera/storage/memory.h"

namespace tessera {
namespace {

const c10::DispatchKeySet kDeferred({c10::DispatchKey::CPU, kDeferredKey});

template <size_t N>
bool is_one_of(const c10::OperatorHandle& op, const std::array<const char*, N>& names) {
  return std::find(names.begin(), names.end(), op.operator_name().name) != names.end();
}

// Change what a tensor is, and no values.
constexpr std::array kAssignments = {"aten::set_data", "aten::data", "aten::detach", "aten::alias", "aten::requires_grad_"};
// Write to arguments of which their schemas don't say so, or to the storage itself.
constexpr std::array kHiddenWrites = {
    "aten::batch_norm",       "aten::native_batch_norm",        "aten::instance_norm",    "aten::_batch_norm_impl_index",
    "aten::rrelu_with_noise", "aten::_native_batch_norm_legit", "aten::cudnn_batch_norm", "aten::resize_",
    "aten::resize_as_",       "aten::resize_as_sparse_",        "aten::_resize_output_",  "aten::set_"};
// Draw as many numbers whatever the values are that they overwrite or are like.
constexpr std::array kValuesDontMatter = {"aten::normal_",    "aten::uniform_",    "aten::random_",   "aten::exponential_",
                                          "aten::geometric_", "aten::cauchy_",     "aten::rand_like", "aten::log_normal_",
                                          "aten::randn_like", "aten::randint_like"};
// Copy whole tensors, as Module::to and clone do before they assign; what they would tell autograd is then dropped.
constexpr std::array kCopies = {"aten::to", "aten::_to_copy", "aten::clone", "aten::contiguous"};

bool any_tensor(const std::vector<c10::IValue>& values) {
  bool any = false;
  for (const auto& value : values) each_tensor(value, [&](const at::Tensor& tensor) { any |= tensor.defined(); });
  return any;
}

// One operator in a scope.
class Recorder {
 public:
  Recorder(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op),
        stack_(stack),
        tape_(Tape::of_thread()),
        arguments_(torch::jit::last(stack, op.schema().arguments().size()).vec()),
        twins_(op, arguments_, *tape_),
        generator_(generator_of(op, arguments_)) {}

  void run() {
    if (generator_ && !generator_->device().is_cpu()) refuse(op_, "its random numbers are not the CPU's");
    auto results = twins_.run();
    if (!makes_a_tensor(results) && twins_.writes().empty()) {  // a view, or a question about shapes
      if (any_tensor(results)) return op_.callBoxed(&stack_);
      return give(std::move(results));
    }
    RecordedOperator recorded = describe_call();
    if (generator_) draw();
    for (auto& result : results)
      result = map_tensors(result, [&](const at::Tensor& meta) { return result_for(meta, recorded); });
    tape_->record(std::move(recorded));
    give(std::move(results));
  }

 private:
  void give(std::vector<c10::IValue> results) {
    torch::jit::drop(stack_, arguments_.size());
    for (auto& result : results) stack_.push_back(std::move(result));
  }

  bool makes_a_tensor(const std::vector<c10::IValue>& results) const {
    bool makes = false;
    for (const auto& result : results)
      each_tensor(result, [&](const at::Tensor& meta) {
        if (!meta.defined() || twins_.in_storage_of(meta) != nullptr) return;
        if (meta.requires_grad() && !is_one_of(op_, kCopies))
          refuse(op_, "autograd would record it, since it takes a parameter that requires gradients",
                 "hold a torch::NoGradGuard in constructors");
        makes = true;
      });
    return makes;
  }

  RecordedOperator describe_call() const {
    RecordedOperator recorded{.op = op_,
                              .arguments = {},
                              .tensors = {},
                              .writes = twins_.writes(),
                              .results = {},
                              .random = generator_ ? std::optional(generator_->clone()) : std::nullopt,
                              .default_type = c10::get_default_dtype()};
    for (const auto& argument : arguments_)
      recorded.arguments.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
        recorded.tensors.push_back(kept(tensor));
        return at::Tensor();
      }));
    return recorded;
  }

  static std::variant<at::Tensor, DeferredRef> kept(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (const auto* entry = DeferredEntry::of(tensor)) return DeferredRef{entry->storage, Geometry::of(tensor)};
    const at::NoGradGuard no_grad;
    auto copy = tensor.detach().clone();  // its owner may change it, or free it, before it is read
    keep_wrapped(tensor, copy);
    return copy;
  }

  // Runs the operator on values, for what that does to the generator.
  void draw() const {
    const at::NoGradGuard no_grad;
    size_t bytes = 0;
    {
      auto stack = is_one_of(op_, kValuesDontMatter) ? with_any_values() : twins_.with_values();
      op_.callBoxed(stack);
      for (const auto& result : stack)
        each_tensor(result, [&](const at::Tensor& tensor) { bytes += tensor.defined() ? tensor.nbytes() : 0; });
    }
    constexpr size_t kMuch = 1 << 20;
    if (bytes >= kMuch) return_freed_memory();
  }

  torch::jit::Stack with_any_values() const {
    torch::jit::Stack stack;
    for (const auto& argument : arguments_)
      stack.push_back(map_tensors(argument, [](const at::Tensor& tensor) {
        if (DeferredEntry::of(tensor) == nullptr) return tensor;
        return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type());
      }));
    return stack;
  }

  at::Tensor result_for(const at::Tensor& meta, RecordedOperator& recorded) {
    auto& noted = recorded.results.emplace_back();
    if (!meta.defined()) return meta;
    if (const auto* twin = twins_.same_as(meta)) return twin->original;
    const Geometry geometry = Geometry::of(meta);
    if (const auto* twin = twins_.in_storage_of(meta)) {
      const bool has_values = DeferredEntry::of(twin->original) == nullptr;
      return geometry.over(twin->original.storage(), has_values ? c10::DispatchKeySet(c10::DispatchKey::CPU) : kDeferred);
    }
    const auto result = geometry.over(tape_->new_storage(static_cast<int64_t>(meta.storage().nbytes())), kDeferred);
    const StorageIndex storage = DeferredEntry::of(result)->storage;
    recorded.writes.push_back(storage);
    noted = DeferredRef{storage, geometry};
    twins_.add(result, meta);  // another result may lie in the same storage
    return result;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::shared_ptr<Tape> tape_;
  std::vector<c10::IValue> arguments_;
  Twins twins_;
  std::optional<at::Generator> generator_;
};

// An operator outside of any scope, on a tensor without values: members of a settled module get them now.
void meet_outside(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  const auto* entry = DeferredEntry::of(tensor);
  if (entry->tape->settled && !tensor.requires_grad() && entry->name().empty()) return materialize({&tensor, 1});
  throw GuardError(text(name_of(op), " uses ", describe(tensor),
                        ", which was built under tessera::Deferred and has no values yet; call "
                        "tessera::fully_shard(module, …) or tessera::materialize(module) first"));
}

void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const bool in_scope = c10::impl::tls_is_dispatch_key_included(kDeferredKey);
  const c10::impl::ExcludeDispatchKeyGuard below(kDeferredKey);
  bool tensors = false;
  std::vector<at::Tensor> deferred;
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size()))
    each_tensor(argument, [&](const at::Tensor& tensor) {
      tensors |= tensor.defined();
      if (DeferredEntry::of(tensor) != nullptr) deferred.push_back(tensor);
    });
  const bool only_values = deferred.empty() && (tensors || !in_scope);
  if (only_values || is_one_of(op, kAssignments)) return op.callBoxed(stack);
  if (in_scope) {
    if (is_one_of(op, kHiddenWrites)) refuse(op, "it changes tensors or their memory in ways that it doesn't declare");
    if (op.hasTag(at::Tag::inplace_view)) return op.callBoxed(stack);
    return Recorder(op, *stack).run();
  }
  for (const auto& tensor : deferred)
    if (DeferredEntry::of(tensor) != nullptr) meet_outside(op, tensor);
  op.callBoxed(stack);
}

}  // namespace

void register_recorder() {}

}  // namespace tessera

TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&tessera::dispatch>()); }
