#include "tessera/engine/deferred_twins.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/deferred.h"

namespace tessera {
namespace {

const c10::DispatchKeySet kMeta(c10::DispatchKey::Meta);

c10::Storage new_meta_storage(size_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                            at::DataPtr(nullptr, at::kMeta), nullptr, /*resizable=*/false));
}

}  // namespace

std::string describe(const at::Tensor& tensor) {
  const auto* entry = DeferredEntry::of(tensor);
  return entry == nullptr || entry->name().empty() ? text("a tensor ", tensor.sizes(), " of type ", tensor.scalar_type())
                                                   : text("'", entry->name(), "' ", tensor.sizes());
}

void refuse(const c10::OperatorHandle& op, const std::string& why, const std::string& remedy) {
  throw ConfigError(text("operator ", name_of(op), " can't be recorded under tessera::Deferred: ", why, "; ",
                         remedy.empty() ? "build what needs it while a tessera::Deferred::Pause lives" : remedy));
}

void keep_wrapped(const at::Tensor& from, const at::Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

bool same_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

// ---- arguments -----------------------------------------------------------------------------------------------------

Twins::Twins(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, const Tape& tape)
    : op_(op), arguments_(arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& declared = op.schema().arguments()[i];
    meta_.push_back(on_meta(declared, map_tensors(arguments[i], [&](const at::Tensor& t) { return twin_of(t, tape); })));
    const auto* alias = declared.alias_info();
    if (alias != nullptr && alias->isWrite())
      each_tensor(arguments[i], [&](const at::Tensor& tensor) { note_write(tensor); });
  }
}

at::Tensor Twins::twin_of(const at::Tensor& original, const Tape& tape) {
  if (!original.defined()) return original;
  for (const auto& twin : twins_)
    if (twin.original.is_same(original)) return twin.meta;
  const auto* entry = DeferredEntry::of(original);
  if (entry != nullptr && entry->tape.get() != &tape)
    refuse(op_, text(describe(original), " was built in another thread's scope"), "build a model on one thread");
  refuse_if_not_dense(original, "takes");
  const at::Tensor meta = Geometry::of(original).over(meta_storage_for(original), kMeta);
  if (original.requires_grad()) meta.set_requires_grad(true);
  keep_wrapped(original, meta);
  add(original, meta);
  return meta;
}

c10::Storage Twins::meta_storage_for(const at::Tensor& original) const {
  for (const auto& twin : twins_)
    if (same_storage(original, twin.original)) return twin.meta.storage();
  return new_meta_storage(original.storage().nbytes());
}

// What makes a tensor makes it on the meta device.
c10::IValue Twins::on_meta(const c10::Argument& declared, c10::IValue argument) const {
  if (declared.name() == "pin_memory") return {};
  if (declared.name() != "device") return argument;
  if (argument.isDevice() && !argument.toDevice().is_cpu())
    refuse(op_, text("it makes a tensor on ", argument.toDevice().str()), "build on the CPU and move the model later");
  return at::Device(at::kMeta);
}

void Twins::note_write(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const auto* entry = DeferredEntry::of(tensor);
  if (entry == nullptr)
    refuse(op_, text("it would write values that aren't there yet to ", describe(tensor), ", which has its own"));
  if (std::find(writes_.begin(), writes_.end(), entry->storage) == writes_.end()) writes_.push_back(entry->storage);
}

void Twins::refuse_if_not_dense(const at::Tensor& tensor, const char* does) const {
  if (!tensor.has_storage() || tensor.layout() != at::kStrided || tensor.is_quantized())
    refuse(op_, text("it ", does, " a tensor that is not dense (", tensor.layout(), ")"));
}

// ---- results -------------------------------------------------------------------------------------------------------

std::vector<c10::IValue> Twins::run() const {
  auto stack = meta_;
  try {
    op_.callBoxed(stack);
  } catch (const c10::Error& error) {
    if (!lacks_meta_kernel(error)) explain(error);
    return run_on_values();
  }
  for (const auto& twin : twins_)
    if (!(Geometry::of(twin.original) == Geometry::of(twin.meta)))
      refuse(op_, text("it changes the shape of ", describe(twin.original)));
  for (const auto& result : stack)
    each_tensor(result, [&](const at::Tensor& made) {
      if (made.defined()) refuse_if_not_dense(made, "makes");
    });
  return {stack.begin(), stack.end()};
}

bool Twins::lacks_meta_kernel(const c10::Error& error) const {
  const auto& returns = op_.schema().returns();
  return dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr && !returns.empty() &&
         std::all_of(returns.begin(), returns.end(),
                     [](const auto& each) { return each.type()->kind() == c10::TypeKind::TensorType; });
}

torch::jit::Stack Twins::with_values() const {
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

std::vector<c10::IValue> Twins::run_on_values() const {
  const at::NoGradGuard no_grad;
  auto stack = with_values();
  const auto given = stack;
  const auto generator = generator_of(op_, arguments_);
  const auto before = generator ? std::optional(generator->clone()) : std::nullopt;
  op_.callBoxed(stack);
  if (generator) at::Generator(*generator).set_state(before->get_state());
  std::vector<c10::IValue> results;
  for (const auto& result : stack)
    results.push_back(map_tensors(result, [&](const at::Tensor& made) {
      if (!made.defined()) return made;
      refuse_if_not_dense(made, "makes");
      for (const auto& argument : given)
        each_tensor(argument, [&](const at::Tensor& tensor) {
          if (tensor.defined() && same_storage(made, tensor))
            refuse(op_, "libtorch has no kernel of it for its meta device");
        });
      return Geometry::of(made).over(new_meta_storage(made.storage().nbytes()), kMeta);
    }));
  return results;
}

// In a handler of `error`. Throws: that the operator wants values, if that is why it failed, or the error itself.
void Twins::explain(const c10::Error& error) const {
  const std::string words = error.what_without_backtrace();
  const bool wants_values = op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape) ||
                            dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr ||
                            words.find("eta tensor") != std::string::npos;
  if (!wants_values) throw;
  std::string of;
  for (const auto& twin : twins_)
    if (of.empty() && DeferredEntry::of(twin.original) != nullptr) of = text(" of ", describe(twin.original));
  refuse(op_,
         text("it needs values", of, ", and there are none yet (",
              words.substr(0, std::min(words.find('\n'), words.find(". "))), ")"),
         "compute it from plain numbers, or build what needs it while a tessera::Deferred::Pause lives");
}

const Twins::Twin* Twins::same_as(const at::Tensor& meta) const {
  const auto found = std::find_if(twins_.begin(), twins_.end(), [&](const Twin& twin) { return twin.meta.is_same(meta); });
  return found == twins_.end() ? nullptr : &*found;
}

const Twins::Twin* Twins::in_storage_of(const at::Tensor& meta) const {
  const auto found =
      std::find_if(twins_.begin(), twins_.end(), [&](const Twin& twin) { return same_storage(meta, twin.meta); });
  return found == twins_.end() ? nullptr : &*found;
}

}  // namespace tessera
