#include "tessera/engine/deferred.h"

#include <algorithm>
#include <map>

#include "tessera/engine/deferred_tape.h"
#include "tessera/storage/memory.h"

namespace tessera {
namespace {

// What a tape is to replay, and the memory that the values are for.
struct Wanted {
  std::vector<StorageIndex> storages;
  std::vector<c10::Storage> places;
};

std::map<std::shared_ptr<Tape>, Wanted> wanted_of(std::span<const at::Tensor> tensors) {
  std::map<std::shared_ptr<Tape>, Wanted> by_tape;
  for (const auto& tensor : tensors) {
    const auto* entry = DeferredEntry::of(tensor);
    if (entry == nullptr) continue;
    auto& wanted = by_tape[entry->tape];
    if (std::find(wanted.storages.begin(), wanted.storages.end(), entry->storage) != wanted.storages.end()) continue;
    wanted.storages.push_back(entry->storage);
    wanted.places.push_back(tensor.storage());
  }
  return by_tape;
}

// Moves the memory of `values` to `place`: all tensors there come to life. This ends the storage's entry.
void fill(const c10::Storage& place, const c10::Storage& values) {
  auto* storage = place.unsafeGetStorageImpl();
  storage->clear_data_ptr_access_error_msg_();
  storage->set_data_ptr_noswap(values.unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, at::kCPU)));
}

// Operators on it need not be looked at any more.
void become_ordinary(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kDeferredKey)) return;
  const auto ordinary = Geometry::of(tensor).over(tensor.storage(), c10::DispatchKeySet(c10::DispatchKey::CPU));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_allow_tensor_metadata_change(true);
  impl->shallow_copy_from(ordinary.getIntrusivePtr());
}

template <class Visit>
void each_registered(const torch::nn::Module& module, Visit&& visit) {
  for (const auto& item : module.named_parameters()) visit(item.key(), item.value());
  for (const auto& item : module.named_buffers()) visit(item.key(), item.value());
}

}  // namespace

Deferred::Deferred()
    : tape_(Tape::of_thread()),
      included_(c10::impl::tls_is_dispatch_key_included(kDeferredKey)),
      excluded_(c10::impl::tls_is_dispatch_key_excluded(kDeferredKey)) {
  register_recorder();
  c10::impl::tls_set_dispatch_key_included(kDeferredKey, true);
  c10::impl::tls_set_dispatch_key_excluded(kDeferredKey, false);
}

Deferred::~Deferred() {
  c10::impl::tls_set_dispatch_key_included(kDeferredKey, included_);
  c10::impl::tls_set_dispatch_key_excluded(kDeferredKey, excluded_);
  if (!included_) tape_->prune();
}

Deferred::Pause::Pause() : excluded_(c10::impl::tls_is_dispatch_key_excluded(kDeferredKey)) {
  c10::impl::tls_set_dispatch_key_excluded(kDeferredKey, true);
}

Deferred::Pause::~Pause() { c10::impl::tls_set_dispatch_key_excluded(kDeferredKey, excluded_); }

void name_deferred(const torch::nn::Module& module) { each_registered(module, &DeferredEntry::set_name); }

void settle_deferred(const torch::nn::Module& module) {
  name_deferred(module);
  each_registered(module, [](const std::string&, const at::Tensor& tensor) {
    if (const auto* entry = DeferredEntry::of(tensor)) entry->tape->settled = true;
  });
}

void materialize(const torch::nn::Module& module) {
  settle_deferred(module);
  std::vector<at::Tensor> tensors;
  each_registered(module, [&](const std::string&, const at::Tensor& tensor) { tensors.push_back(tensor); });
  materialize(tensors);
}

void materialize(std::span<const at::Tensor> tensors) {
  const Deferred::Pause pause;
  for (const auto& [tape, wanted] : wanted_of(tensors)) {
    const auto values = tape->replay(wanted.storages);
    for (size_t i = 0; i < values.size(); ++i) fill(wanted.places[i], values[i]);
    tape->prune();
    return_freed_memory();  // of copies that only these needed
  }
  for (const auto& tensor : tensors) become_ordinary(tensor);
}

std::vector<at::Tensor> values_of(std::span<const at::Tensor> tensors) {
  const Deferred::Pause pause;
  std::map<const c10::StorageImpl*, c10::Storage> values;
  for (const auto& [tape, wanted] : wanted_of(tensors)) {
    auto replayed = tape->replay(wanted.storages);
    for (size_t i = 0; i < replayed.size(); ++i)
      values.emplace(wanted.places[i].unsafeGetStorageImpl(), std::move(replayed[i]));
  }
  std::vector<at::Tensor> with_values;
  for (const auto& tensor : tensors) {
    if (DeferredEntry::of(tensor) == nullptr) {
      with_values.push_back(tensor);
      continue;
    }
    const auto& storage = values.at(tensor.storage().unsafeGetStorageImpl());
    with_values.push_back(Geometry::of(tensor).over(storage, c10::DispatchKeySet(c10::DispatchKey::CPU)));
  }
  return with_values;
}

}  // namespace tessera
