// What happens to operators in a Deferred scope, and to those that meet its tensors outside.
//
// An operator runs on twins of its arguments on libtorch's meta device, which tells the shapes, types and strides of its
// results, and whether they are views. Views are then made for real, of the storage without memory; anything else is put on
// the tape. One that draws random numbers runs once more, on values, to move the generator as construction would.
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
#include "tessera/storage/memory.h"

namespace tessera {
namespace {

using Arguments = std::vector<c10::IValue>;

const c10::DispatchKeySet kMeta(c10::DispatchKey::Meta);
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

constexpr const char* kPause = "; build what needs it while a tessera::Deferred::Pause lives";

std::string shown(const at::Tensor& tensor) {
  const auto* entry = DeferredEntry::of(tensor);
  return entry == nullptr || entry->name().empty() ? text("a tensor ", tensor.sizes(), " of type ", tensor.scalar_type())
                                                   : text("'", entry->name(), "' ", tensor.sizes());
}

bool same_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

// A number that came as a tensor takes no part in the choice of a result's type.
void keep_wrapped(const at::Tensor& from, const at::Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

[[noreturn]] void refuse(const c10::OperatorHandle& op, const std::string& why, const std::string& remedy = kPause) {
  throw ConfigError(text("operator ", name_of(op), " can't be recorded under tessera::Deferred: ", why, remedy));
}

// One operator in a scope.
class Recorder {
 public:
  Recorder(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op_(op), stack_(stack), tape_(Tape::of_thread()) {
    const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
    arguments_.assign(arguments.begin(), arguments.end());
  }

  void run() {
    const auto generator = generator_of(op_, arguments_);
    if (generator && !generator->device().is_cpu()) refuse(op_, "its random numbers are not the CPU's");
    auto results = on_twins();
    const bool made = classify(results);
    if (!made && writes_.empty()) {  // a view, or a question about shapes
      if (any_tensor(results)) return op_.callBoxed(&stack_);
      return give(std::move(results));
    }
    RecordedOperator recorded{.op = op_,
                              .arguments = {},
                              .tensors = {},
                              .writes = std::move(writes_),
                              .results = {},
                              .random = generator ? std::optional(generator->clone()) : std::nullopt,
                              .default_type = c10::get_default_dtype()};
    for (const auto& argument : arguments_)
      recorded.arguments.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
        recorded.tensors.push_back(kept(tensor));
        return at::Tensor();
      }));
    if (generator) draw();
    for (auto& result : results)
      result = map_tensors(result, [&](const at::Tensor& twin) { return result_for(twin, recorded); });
    tape_->record(std::move(recorded));
    give(std::move(results));
  }

 private:
  struct Twin {
    at::Tensor original, meta;
  };

  void give(Arguments results) {
    torch::jit::drop(stack_, arguments_.size());
    for (auto& result : results) stack_.push_back(std::move(result));
  }

  static bool any_tensor(const Arguments& values) {
    bool any = false;
    for (const auto& value : values) each_tensor(value, [&](const at::Tensor& tensor) { any |= tensor.defined(); });
    return any;
  }

  void refuse_if_not_dense(const at::Tensor& tensor, const char* does) const {
    if (!tensor.has_storage() || tensor.layout() != at::kStrided || tensor.is_quantized())
      refuse(op_, text("it ", does, " a tensor that is not dense (", tensor.layout(), ")"));
  }

  // The storage of twins of what lies in `original`'s storage.
  c10::Storage meta_storage_for(const at::Tensor& original) const {
    for (const auto& twin : twins_)
      if (same_storage(original, twin.original)) return twin.meta.storage();
    return new_meta_storage(original.storage().nbytes());
  }

  static c10::Storage new_meta_storage(size_t bytes) {
    return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes, at::DataPtr(nullptr, at::kMeta), nullptr, /*resizable=*/false));
  }

  at::Tensor twin_of(const at::Tensor& original) {
    if (!original.defined()) return original;
    for (const auto& twin : twins_)
      if (twin.original.is_same(original)) return twin.meta;
    const auto* entry = DeferredEntry::of(original);
    if (entry != nullptr && entry->tape != tape_)
      refuse(op_, text(shown(original), " was built in another thread's scope"), "; build a model on one thread");
    refuse_if_not_dense(original, "takes");
    const at::Tensor meta = Geometry::of(original).over(meta_storage_for(original), kMeta);
    if (original.requires_grad()) meta.set_requires_grad(true);
    keep_wrapped(original, meta);
    twins_.push_back({original, meta});
    return meta;
  }

  Arguments on_twins() {
    if (is_one_of(op_, kHiddenWrites)) refuse(op_, "it changes tensors or their memory in ways that it doesn't declare");
    const auto& schema = op_.schema();
    torch::jit::Stack stack;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& declared = schema.arguments()[i];
      auto argument = map_tensors(arguments_[i], [&](const at::Tensor& tensor) { return twin_of(tensor); });
      if (declared.name() == "device") {
        if (argument.isDevice() && !argument.toDevice().is_cpu())
          refuse(op_, text("it makes a tensor on ", argument.toDevice().str()),
                 "; build on the CPU and move the model later");
        argument = at::Device(at::kMeta);
      }
      if (declared.name() == "pin_memory") argument = c10::IValue();
      stack.push_back(std::move(argument));
      const auto* alias = declared.alias_info();
      if (alias != nullptr && alias->isWrite())
        each_tensor(arguments_[i], [&](const at::Tensor& tensor) { note_write(tensor); });
    }
    Arguments results;
    try {
      op_.callBoxed(stack);
      results.assign(stack.begin(), stack.end());
    } catch (const c10::Error& error) {
      if (!lacks_meta_kernel(error)) explain(error);
      results = on_values();
    }
    for (const auto& twin : twins_)
      if (!(Geometry::of(twin.original) == Geometry::of(twin.meta)))
        refuse(op_, text("it changes the shape of ", shown(twin.original)));
    return results;
  }

  // Operators that give tensors, but can't say of which shape without values, may have them.
  bool lacks_meta_kernel(const c10::Error& error) const {
    const auto& returns = op_.schema().returns();
    return dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr && !returns.empty() &&
           std::all_of(returns.begin(), returns.end(),
                       [](const auto& each) { return each.type()->kind() == c10::TypeKind::TensorType; });
  }

  // The arguments with the values that construction would give them at this place.
  torch::jit::Stack with_values() const {
    std::vector<at::Tensor> originals;
    for (const auto& twin : twins_) originals.push_back(twin.original);
    const auto values = values_of(originals);
    torch::jit::Stack stack;
    for (const auto& argument : arguments_)
      stack.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
        for (size_t i = 0; i < originals.size(); ++i)
          if (originals[i].is_same(tensor)) return values[i];
        return tensor;
      }));
    return stack;
  }

  // As on_twins, learned from a run on values. Costs all that these follow from.
  Arguments on_values() const {
    const at::NoGradGuard no_grad;
    auto stack = with_values();
    Arguments arguments(stack.begin(), stack.end());
    const auto generator = generator_of(op_, arguments_);
    const auto before = generator ? std::optional(generator->clone()) : std::nullopt;
    op_.callBoxed(stack);
    if (generator) at::Generator(*generator).set_state(before->get_state());
    for (const auto& result : stack)
      each_tensor(result, [&](const at::Tensor& made) {
        if (!made.defined()) return;
        refuse_if_not_dense(made, "makes");
        for (const auto& argument : arguments)
          each_tensor(argument, [&](const at::Tensor& given) {
            if (given.defined() && same_storage(made, given))
              refuse(op_, "libtorch has no kernel of it for its meta device");
          });
      });
    Arguments results;
    for (const auto& result : stack)
      results.push_back(map_tensors(result, [](const at::Tensor& made) {
        return made.defined() ? Geometry::of(made).over(new_meta_storage(made.storage().nbytes()), kMeta) : made;
      }));
    return results;
  }

  void note_write(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto* entry = DeferredEntry::of(tensor);
    if (entry == nullptr)
      refuse(op_, text("it would write values that aren't there yet to ", shown(tensor), ", which has its own"));
    if (std::find(writes_.begin(), writes_.end(), entry->storage) == writes_.end()) writes_.push_back(entry->storage);
  }

  // In a handler of `error`. Throws: that the operator wants values, if that is why it failed, or the error itself.
  [[noreturn]] void explain(const c10::Error& error) const {
    const std::string words = error.what_without_backtrace();
    const bool wants_values = op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape) ||
                              dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr ||
                              words.find("eta tensor") != std::string::npos;
    if (!wants_values) throw;
    std::string of;
    for (const auto& twin : twins_)
      if (of.empty() && DeferredEntry::of(twin.original) != nullptr) of = text(" of ", shown(twin.original));
    refuse(op_, text("it needs values", of, ", and there are none yet (", words.substr(0, words.find('\n')), ")"),
           "; compute it from plain numbers, or build what needs it while a tessera::Deferred::Pause lives");
  }

  const Twin* twin_with_storage(const at::Tensor& meta) const {
    for (const auto& twin : twins_)
      if (same_storage(meta, twin.meta)) return &twin;
    return nullptr;
  }

  // Is there a tensor among the results that the operator made?
  bool classify(const Arguments& results) {
    bool made = false;
    for (const auto& result : results)
      each_tensor(result, [&](const at::Tensor& meta) {
        if (!meta.defined()) return;
        refuse_if_not_dense(meta, "makes");
        if (twin_with_storage(meta) != nullptr) return;
        if (meta.requires_grad() && !is_one_of(op_, kCopies))
          refuse(op_, "autograd would record it, since it takes a parameter that requires gradients",
                 "; hold a torch::NoGradGuard in constructors");
        made = true;
      });
    return made;
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
      auto stack = is_one_of(op_, kValuesDontMatter) ? with_any_values() : with_values();
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
    if (!meta.defined()) return recorded.results.emplace_back(), meta;
    for (const auto& twin : twins_)
      if (twin.meta.is_same(meta)) return recorded.results.emplace_back(), twin.original;
    const Geometry geometry = Geometry::of(meta);
    if (const auto* twin = twin_with_storage(meta)) {
      recorded.results.emplace_back();
      const auto keys =
          DeferredEntry::of(twin->original) != nullptr ? kDeferred : c10::DispatchKeySet(c10::DispatchKey::CPU);
      return geometry.over(twin->original.storage(), keys);
    }
    const auto result = geometry.over(tape_->new_storage(static_cast<int64_t>(meta.storage().nbytes())), kDeferred);
    const StorageIndex storage = DeferredEntry::of(result)->storage;
    recorded.writes.push_back(storage);
    recorded.results.emplace_back(DeferredRef{storage, geometry});
    // Another result may lie in the same storage.
    twins_.push_back({result, meta});
    return result;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::shared_ptr<Tape> tape_;
  Arguments arguments_;
  std::vector<Twin> twins_;
  std::vector<StorageIndex> writes_;
};

// An operator outside of any scope, on tensors without values: members of a settled module get them now.
void meet_outside(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  const auto* entry = DeferredEntry::of(tensor);
  if (entry->tape->settled && !tensor.requires_grad() && entry->name().empty()) return materialize({&tensor, 1});
  throw GuardError(text(name_of(op), " uses ", shown(tensor),
                        ", which was built under tessera::Deferred and has no values yet; call "
                        "tessera::fully_shard(module, …) or tessera::materialize(module) first"));
}

void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const bool in_scope = c10::impl::tls_is_dispatch_key_included(kDeferredKey);
  const c10::impl::ExcludeDispatchKeyGuard below(kDeferredKey);
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  bool tensors = false;
  std::vector<at::Tensor> deferred;
  for (const auto& argument : arguments)
    each_tensor(argument, [&](const at::Tensor& tensor) {
      tensors |= tensor.defined();
      if (DeferredEntry::of(tensor) != nullptr) deferred.push_back(tensor);
    });
  const bool only_values = deferred.empty() && (tensors || !in_scope);
  const bool assigns =
      is_one_of(op, kAssignments) || (in_scope && op.hasTag(at::Tag::inplace_view) && !is_one_of(op, kHiddenWrites));
  if (only_values || assigns) return op.callBoxed(stack);
  if (in_scope) return Recorder(op, *stack).run();
  for (const auto& tensor : deferred)
    if (DeferredEntry::of(tensor) != nullptr) meet_outside(op, tensor);
  op.callBoxed(stack);
}

}  // namespace

void register_recorder() {}

}  // namespace tessera

TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&tessera::dispatch>()); }
