#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string_view>

namespace tessera {

class AccessHandler;

/// Who is to be told of operators on one guarded storage. The storage's owner pointer points to one of these.
struct Observed {
  enum class Kind : uint8_t { unit, shard };

  AccessHandler* handler;
  Kind kind;
  uint32_t unit;           ///< index of the unit
  uint32_t parameter = 0;  ///< index in the unit, for a shard
};

/// One observed tensor among an operator's arguments.
struct Access {
  const Observed* what;
  bool writes;  ///< the operator's schema says that it writes to this argument
};

/// Is told before an operator computes with observed tensors, and after one that wrote to some.
/// All of the operator's accesses come at once. What `before` throws reaches the caller of the operator.
class AccessHandler {
 public:
  virtual ~AccessHandler() = default;
  virtual void before(std::span<const Access> accesses, std::string_view operation) = 0;
  virtual void after(std::span<const Access> accesses, std::span<const c10::IValue> results, std::string_view operation) = 0;
  /// Does this handler want `after` for this operator? (Writes always; all of them while it looks for non-finite numbers.)
  virtual bool wants_results() const = 0;
};

/// Operators observed by this process so far.
int64_t operators_observed();

/// The observer lives in the dispatcher's table: one fallback for the key Fake. Referring to this function links it in.
void register_observer();

}  // namespace tessera
