#include "tessera/engine/deferred_tape.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <algorithm>

#include "tessera/base/check.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/storage/memory.h"

namespace tessera {
namespace {

constexpr const char* kNoMemory =
    " was built under tessera::Deferred and has no values yet, so its memory can't be read (data_ptr, accessor, "
    "torch::tensor "
    "of a vector). Within a constructor, build what must be read or filled by hand while a tessera::Deferred::Pause lives; "
    "afterwards call tessera::fully_shard or tessera::materialize first";

// What replaying must neither see nor change: the scope, gradients, autocast, the default generator.
class ReplayState {
 public:
  ReplayState() : generator_(at::detail::getDefaultCPUGenerator()), before_(generator_.clone()) {}
  ~ReplayState() { generator_.set_state(before_.get_state()); }
  ReplayState(const ReplayState&) = delete;
  ReplayState& operator=(const ReplayState&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard scope_{c10::DispatchKeySet(kDeferredKey) | c10::autocast_dispatch_keyset};
  c10::InferenceMode inference_{false};
  at::NoGradGuard no_grad_;
  at::Generator generator_, before_;
};

class DefaultType {
 public:
  explicit DefaultType(caffe2::TypeMeta type) : before_(c10::get_default_dtype()) {
    if (type != before_) c10::set_default_dtype(type);
  }
  ~DefaultType() {
    if (before_ != c10::get_default_dtype()) c10::set_default_dtype(before_);
  }
  DefaultType(const DefaultType&) = delete;
  DefaultType& operator=(const DefaultType&) = delete;

 private:
  caffe2::TypeMeta before_;
};

constexpr int64_t kMuch = 1 << 20;  // freed bytes that are worth to be given back at once

const c10::DispatchKeySet kReal(c10::DispatchKey::CPU);

using RealStorages = std::vector<c10::Storage>;  // by index; an empty one is not there

c10::IValue argument_for(const RecordedOperator& recorded, const c10::IValue& argument, size_t& next,
                         const RealStorages& real) {
  return map_tensors(argument, [&](const at::Tensor&) {
    const auto& tensor = recorded.tensors[next++];
    if (const auto* values = std::get_if<at::Tensor>(&tensor)) return *values;
    const auto& ref = std::get<DeferredRef>(tensor);
    return ref.geometry.over(real[ref.storage], kReal);
  });
}

torch::jit::Stack call(const RecordedOperator& recorded, const RealStorages& real) {
  torch::jit::Stack stack;
  size_t next = 0;
  for (const auto& argument : recorded.arguments) stack.push_back(argument_for(recorded, argument, next, real));
  if (recorded.random) {
    const auto& schema = recorded.op.schema().arguments();
    bool given = false;
    for (size_t i = 0; i < stack.size(); ++i)
      if (schema[i].name() == "generator" && stack[i].isGenerator()) {
        stack[i] = recorded.random->clone();  // the user's own must not move again
        given = true;
      }
    if (!given) at::Generator(at::detail::getDefaultCPUGenerator()).set_state(recorded.random->get_state());
  }
  const DefaultType type(recorded.default_type);
  try {
    recorded.op.callBoxed(stack);
  } catch (const c10::Error& error) {
    throw ConfigError(
        text("operator ", name_of(recorded.op),
             ", recorded under tessera::Deferred, failed when it was run again: ", error.what_without_backtrace()));
  }
  return stack;
}

// The storage of what the operator made: as it lay in construction, and no other's.
c10::Storage storage_of(const at::Tensor& made, const DeferredRef& wanted, int64_t bytes, const RealStorages& real,
                        const RecordedOperator& recorded) {
  const Geometry geometry = Geometry::of(made);
  if (geometry.sizes != wanted.geometry.sizes || geometry.type != wanted.geometry.type)
    throw ConfigError(text(name_of(recorded.op), " gave another shape or type when it was run again for tessera::Deferred; ",
                           "build its result while a tessera::Deferred::Pause lives"));
  const auto* storage = made.storage().unsafeGetStorageImpl();
  const bool taken = std::any_of(real.begin(), real.end(),
                                 [&](const auto& other) { return other && other.unsafeGetStorageImpl() == storage; });
  if (geometry == wanted.geometry && !taken && static_cast<int64_t>(made.storage().nbytes()) >= wanted.geometry.extent())
    return made.storage();
  const auto copy = at::empty({bytes}, at::kByte);
  wanted.geometry.over(copy.storage(), kReal).copy_(made);
  return copy.storage();
}

}  // namespace

// ---- geometry ------------------------------------------------------------------------------------------------------

Geometry Geometry::of(const at::Tensor& tensor) {
  return {c10::DimVector(tensor.sizes()),
          c10::DimVector(tensor.strides()),
          tensor.storage_offset(),
          tensor.scalar_type(),
          tensor.is_conj(),
          tensor.is_neg()};
}

bool Geometry::operator==(const Geometry& other) const {
  return sizes == other.sizes && strides == other.strides && offset == other.offset && type == other.type &&
         conjugated == other.conjugated && negated == other.negated;
}

at::Tensor Geometry::over(const c10::Storage& storage, c10::DispatchKeySet keys) const {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(type));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  if (conjugated) tensor._set_conj(true);
  if (negated) tensor._set_neg(true);
  return tensor;
}

int64_t Geometry::extent() const {
  int64_t last = offset;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) return 0;
    last += (sizes[dim] - 1) * strides[dim];
  }
  return (last + 1) * static_cast<int64_t>(c10::elementSize(type));
}

// ---- storages ------------------------------------------------------------------------------------------------------

std::shared_ptr<Tape> Tape::of_thread() {
  thread_local std::weak_ptr<Tape> current;
  auto tape = current.lock();
  if (!tape) current = tape = std::make_shared<Tape>();
  return tape;
}

c10::Storage Tape::new_storage(int64_t bytes) {
  const auto index = static_cast<StorageIndex>(storages_.size());
  storages_.push_back({bytes});
  // The context, not the data, makes this data pointer call its deleter: there is no data.
  at::DataPtr nothing(nullptr, new DeferredEntry{shared_from_this(), index}, &DeferredEntry::forget, at::kCPU);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(nothing),
                                                             nullptr, /*resizable=*/false));
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(text("this tensor", kNoMemory));
  return storage;
}

void DeferredEntry::forget(void* entry) {
  const std::unique_ptr<DeferredEntry> owned(static_cast<DeferredEntry*>(entry));
  owned->tape->storages_[owned->storage].alive = false;
}

const DeferredEntry* DeferredEntry::of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kDeferredKey) || !tensor.has_storage()) return nullptr;
  const auto& data = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &forget ? static_cast<const DeferredEntry*>(data.get_context()) : nullptr;
}

void DeferredEntry::set_name(const std::string& name, const at::Tensor& tensor) {
  const auto* entry = of(tensor);
  if (entry == nullptr) return;
  entry->tape->storages_[entry->storage].name = name;
  tensor.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      text("'", name, "'", kNoMemory));
}

// ---- replay --------------------------------------------------------------------------------------------------------

// Indices of the operators that the values of the marked storages follow from, the last first.
std::vector<size_t> Tape::needed_for(std::vector<char> storages) const {
  std::vector<size_t> slice;
  for (size_t i = operators_.size(); i-- > 0;) {
    const auto& recorded = operators_[i];
    if (std::none_of(recorded.writes.begin(), recorded.writes.end(), [&](StorageIndex s) { return storages[s] != 0; }))
      continue;
    slice.push_back(i);
    for (const auto& tensor : recorded.tensors)
      if (const auto* ref = std::get_if<DeferredRef>(&tensor)) storages[ref->storage] = 1;
  }
  return slice;
}

std::vector<c10::Storage> Tape::replay(std::span<const StorageIndex> wanted) const {
  return_freed_memory();  // of the replay before
  const ReplayState state;
  std::vector<char> is_wanted(storages_.size(), 0);
  for (const StorageIndex storage : wanted) is_wanted[storage] = 1;
  const auto slice = needed_for(is_wanted);
  // A storage that is not wanted goes after the operator that uses it last.
  std::vector<std::vector<StorageIndex>> ends(slice.size());
  std::vector<char> seen = is_wanted;
  for (size_t i = 0; i < slice.size(); ++i) {
    const auto end = [&](StorageIndex storage) {
      if (!std::exchange(seen[storage], 1)) ends[i].push_back(storage);
    };
    const auto& recorded = operators_[slice[i]];
    for (const StorageIndex storage : recorded.writes) end(storage);
    for (const auto& tensor : recorded.tensors)
      if (const auto* ref = std::get_if<DeferredRef>(&tensor)) end(ref->storage);
  }
  RealStorages real(storages_.size());
  for (size_t i = slice.size(); i-- > 0;) {
    const auto& recorded = operators_[slice[i]];
    {
      const auto stack = call(recorded, real);
      size_t result = 0;
      for (const auto& output : stack)
        each_tensor(output, [&](const at::Tensor& made) {
          const auto& ref = recorded.results[result++];
          if (ref && !real[ref->storage])
            real[ref->storage] = storage_of(made, *ref, storages_[ref->storage].bytes, real, recorded);
        });
    }
    int64_t freed = 0;
    for (const StorageIndex storage : ends[i]) {
      real[storage] = c10::Storage();
      freed += storages_[storage].bytes;
    }
    if (freed >= kMuch) return_freed_memory();
  }
  std::vector<c10::Storage> values;
  for (const StorageIndex storage : wanted) {
    TESSERA_CHECK(real[storage], text("no operator made storage ", storage));
    values.push_back(real[storage]);
  }
  return values;
}

void Tape::prune() {
  std::vector<char> alive(storages_.size(), 0);
  for (size_t i = 0; i < storages_.size(); ++i) alive[i] = storages_[i].alive ? 1 : 0;
  auto needed = needed_for(alive);
  std::reverse(needed.begin(), needed.end());
  size_t kept = 0;
  for (const size_t i : needed) {
    if (i != kept) operators_[kept] = std::move(operators_[i]);
    ++kept;
  }
  operators_.erase(operators_.begin() + static_cast<std::ptrdiff_t>(kept), operators_.end());
}

// ---- operators -----------------------------------------------------------------------------------------------------

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : text(name.name, ".", name.overload_name);
}

std::optional<at::Generator> generator_of(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments) {
  const auto& schema = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].isGenerator()) {
      const auto generator = arguments[i].toGenerator();
      if (generator.defined()) return generator;
    }
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return at::detail::getDefaultCPUGenerator();
  for (const auto& argument : schema)
    if (argument.name() == "generator") return at::detail::getDefaultCPUGenerator();
  return std::nullopt;
}

}  // namespace tessera
