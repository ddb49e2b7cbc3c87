#include "tessera/storage/guarded_storage.h"

#include <utility>

namespace tessera {
namespace {

// Identifies our data pointers; the memory behind them belongs to others.
void not_owned(void*) {}

}  // namespace

GuardedStorage::GuardedStorage(Bytes bytes, at::Device device, void* owner, std::string guard_message)
    : storage_(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes.value,
                                                     at::DataPtr(nullptr, device), nullptr, /*resizable=*/false)),
      owner_(owner),
      guard_message_(std::move(guard_message)) {
  detach();
}

GuardedStorage::~GuardedStorage() {
  owner_ = nullptr;
  guard_message_ += "; and the sharded model that owned them is gone";
  detach();
}

void GuardedStorage::point_to(void* data) {
  // A DataPtr calls its deleter only for a context, and the context is how an operator's observer finds the owner.
  storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(
      at::DataPtr(data, owner_, owner_ ? &not_owned : nullptr, storage_.device()));
}

void GuardedStorage::attach(void* data) {
  storage_.unsafeGetStorageImpl()->clear_data_ptr_access_error_msg_();
  point_to(data);
  attached_ = true;
}

void GuardedStorage::detach() {
  point_to(nullptr);
  storage_.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(guard_message_);
  attached_ = false;
}

at::Tensor GuardedStorage::view(at::IntArrayRef sizes, int64_t offset, at::ScalarType type) const {
  const auto backend = storage_.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage_), c10::DispatchKeySet({backend, c10::DispatchKey::Fake}), c10::scalarTypeToTypeMeta(type));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_contiguous(sizes);
  return tensor;
}

void* GuardedStorage::owner_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto& data = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &not_owned ? data.get_context() : nullptr;
}

}  // namespace tessera
