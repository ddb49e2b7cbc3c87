#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera {

/// How a tensor lies in its storage.
struct Geometry {
  c10::DimVector sizes, strides;
  int64_t offset = 0;
  c10::ScalarType type = c10::ScalarType::Float;
  bool conjugated = false, negated = false;

  static Geometry of(const at::Tensor& tensor);
  at::Tensor over(const c10::Storage& storage, c10::DispatchKeySet keys) const;
  /// Bytes that a storage must have for this.
  int64_t extent() const;
  bool operator==(const Geometry& other) const;
};

using StorageIndex = uint32_t;

/// A tensor without values among the arguments or results of a recorded operator.
struct DeferredRef {
  StorageIndex storage;
  Geometry geometry;
};

/// What an operator was called with. Views are not recorded: a tensor is its storage and its geometry.
struct RecordedOperator {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;                          ///< without their tensors
  std::vector<std::variant<at::Tensor, DeferredRef>> tensors;  ///< of the arguments, in order: values, or what had none
  std::vector<StorageIndex> writes;                            ///< that the operator made or wrote to
  std::vector<std::optional<DeferredRef>> results;             ///< tensors in order; those that the operator made
  std::optional<at::Generator> random;                         ///< as it was before the call, if the operator draws from it
  caffe2::TypeMeta default_type;
};

/// The operators that made and filled the tensors of one thread's Deferred scopes. Lives while one of these tensors has no
/// values. Identity is the storage: everything that views it comes to life with it. Not thread-safe.
class Tape : public std::enable_shared_from_this<Tape> {
 public:
  /// The calling thread's: the one that is in use, or a new one.
  static std::shared_ptr<Tape> of_thread();

  /// A storage whose accesses throw, saying what to do.
  c10::Storage new_storage(int64_t bytes);
  void record(RecordedOperator&& recorded) { operators_.push_back(std::move(recorded)); }

  /// Storages with the values that construction would have left in `wanted`. Runs all operators that matter to them, in
  /// order, and frees what they leave besides. The random generator is as before. O(operators recorded) and their time.
  std::vector<c10::Storage> replay(std::span<const StorageIndex> wanted) const;

  /// Forgets what no storage without values needs any more.
  void prune();

  /// A module of this tape has got its values. Tensors that belong to none get theirs when they are first used.
  bool settled = false;

 private:
  friend struct DeferredEntry;

  struct Described {
    int64_t bytes;
    bool alive = true;  ///< and without values
    std::string name = {};
  };

  std::vector<size_t> needed_for(std::vector<char> storages) const;

  std::vector<Described> storages_;
  std::vector<RecordedOperator> operators_;
};

/// What a storage without values belongs to.
struct DeferredEntry {
  std::shared_ptr<Tape> tape;
  StorageIndex storage;

  /// Of `tensor`'s storage, or nullptr if the tensor has values. O(1).
  static const DeferredEntry* of(const at::Tensor& tensor);
  const std::string& name() const { return tape->storages_[storage].name; }  ///< or "", if it was given none
  static void set_name(const std::string& name, const at::Tensor& tensor);   ///< also in errors about its memory
  static void forget(void* entry);
};

/// Every tensor in `value` (one, a list, a list of optional ones) replaced by `map` of it.
template <class Map>
c10::IValue map_tensors(const c10::IValue& value, Map&& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(map(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(map(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

template <class Visit>
void each_tensor(const c10::IValue& value, Visit&& visit) {
  map_tensors(value, [&](const at::Tensor& tensor) { return visit(tensor), tensor; });
}

/// The key of tensors without values and of the scopes that make them.
constexpr auto kDeferredKey = c10::DispatchKey::DeferredInit;

/// "aten::add_.Tensor".
std::string name_of(const c10::OperatorHandle& op);

/// The recorder is one fallback in the dispatcher's table. Referring to this function links it in.
void register_recorder();

/// The generator that an operator with these arguments draws from, or none if it draws from none.
std::optional<at::Generator> generator_of(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);

}  // namespace tessera
