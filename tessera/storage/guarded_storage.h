#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/base/types.h"

namespace tessera {

/// One c10::Storage whose memory comes and goes while tensors keep viewing it. Shapes and strides of the views never change;
/// while no memory is attached, any access to a view throws with the guard's message instead of reading something else.
/// Views made by `view` carry the out-of-core dispatch key Fake, so that operators on them, and on views of them, can be
/// observed.
class GuardedStorage {
 public:
  /// `owner` is what `owner_of` returns for any tensor in this storage. The storage starts detached.
  GuardedStorage(Bytes bytes, at::Device device, void* owner, std::string guard_message);
  /// Tensors that outlive this object stay guarded, with a message that says that their owner is gone.
  ~GuardedStorage();
  GuardedStorage(const GuardedStorage&) = delete;
  GuardedStorage& operator=(const GuardedStorage&) = delete;

  /// Lets the storage use `data` (of at least its size, not owned) until detach.
  void attach(void* data);
  void detach();
  bool attached() const { return attached_; }

  /// A contiguous tensor of `sizes` that starts at element `offset` of the storage.
  at::Tensor view(at::IntArrayRef sizes, int64_t offset, at::ScalarType type) const;

  /// The owner of the guarded storage that `tensor` lies in, or nullptr. O(1), no lock.
  static void* owner_of(const at::Tensor& tensor);

 private:
  void point_to(void* data);

  c10::Storage storage_;
  void* owner_;
  std::string guard_message_;
  bool attached_ = false;
};

}  // namespace tessera
