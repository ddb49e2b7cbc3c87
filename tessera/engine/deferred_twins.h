#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "tessera/engine/deferred_tape.h"

namespace tessera {

/// "'layer.weight' [8, 8]", or its shape and type where it has no name.
std::string describe(const at::Tensor& tensor);

/// Throws a ConfigError that names the operator. The usual remedy is a Pause.
[[noreturn]] void refuse(const c10::OperatorHandle& op, const std::string& why, const std::string& remedy = "");

/// Keeps what a number that came as a tensor has: it takes no part in the choice of a result's type.
void keep_wrapped(const at::Tensor& from, const at::Tensor& to);

/// Do both lie in one storage? Asks for no memory.
bool same_storage(const at::Tensor& a, const at::Tensor& b);

/// An operator's arguments once more, on libtorch's meta device: what tells the shapes, types and strides of its results,
/// and which of them are views, without values.
class Twins {
 public:
  struct Twin {
    at::Tensor original, meta;
  };

  /// Refuses arguments that can't be recorded.
  Twins(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, const Tape& tape);

  /// The operator's results for the twins. Where libtorch has no kernel for that, they are learned from a run on values.
  /// Throws ConfigError if the operator needs values to give other than tensors, and its own error if it fails for another
  /// reason.
  std::vector<c10::IValue> run() const;

  /// The original arguments, with the values that construction would give them at this place. O(their history).
  torch::jit::Stack with_values() const;

  /// Storages without values that the operator writes to.
  const std::vector<StorageIndex>& writes() const { return writes_; }

  /// The twin that is this result, and one in the storage of this result, or nullptr.
  const Twin* same_as(const at::Tensor& meta) const;
  const Twin* in_storage_of(const at::Tensor& meta) const;
  void add(const at::Tensor& original, const at::Tensor& meta) { twins_.push_back({original, meta}); }

 private:
  at::Tensor twin_of(const at::Tensor& original, const Tape& tape);
  c10::Storage meta_storage_for(const at::Tensor& original) const;
  c10::IValue on_meta(const c10::Argument& declared, c10::IValue argument) const;
  void note_write(const at::Tensor& tensor);
  void refuse_if_not_dense(const at::Tensor& tensor, const char* does) const;
  bool lacks_meta_kernel(const c10::Error& error) const;
  std::vector<c10::IValue> run_on_values() const;
  [[noreturn]] void explain(const c10::Error& error) const;

  const c10::OperatorHandle& op_;
  const std::vector<c10::IValue>& arguments_;
  std::vector<Twin> twins_;
  std::vector<StorageIndex> writes_;
  torch::jit::Stack meta_;
};

}  // namespace tessera
