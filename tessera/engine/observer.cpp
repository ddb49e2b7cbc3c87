#include "tessera/engine/observer.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <atomic>

#include "tessera/storage/guarded_storage.h"

namespace tessera {
namespace {

constexpr auto kAccess = c10::DispatchKey::Fake;
using Accesses = c10::SmallVector<Access, 8>;

std::atomic<int64_t> observed{0};

void note(const at::Tensor& tensor, bool writes, Accesses& accesses) {
  if (!tensor.defined() || !tensor.key_set().has(kAccess)) return;
  const auto* owner = static_cast<const Observed*>(GuardedStorage::owner_of(tensor));
  if (owner == nullptr) return;
  for (auto& access : accesses) {
    if (access.what != owner) continue;
    access.writes |= writes;
    return;
  }
  accesses.push_back({owner, writes});
}

void note_all(const c10::IValue& argument, bool writes, Accesses& accesses) {
  if (argument.isTensor()) {
    note(argument.toTensor(), writes, accesses);
  } else if (argument.isTensorList()) {
    for (const at::Tensor& tensor : argument.toTensorList()) note(tensor, writes, accesses);
  } else if (argument.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorVector())
      if (tensor) note(*tensor, writes, accesses);
  }
}

// Tells each handler among the accesses once, with its own accesses only. Nearly always there is one.
template <class Tell>
void tell_each(const Accesses& accesses, Tell&& tell) {
  c10::SmallVector<AccessHandler*, 2> handlers;
  for (const auto& access : accesses)
    if (std::find(handlers.begin(), handlers.end(), access.what->handler) == handlers.end())
      handlers.push_back(access.what->handler);
  if (handlers.size() == 1) return tell(*handlers[0], accesses);
  for (auto* handler : handlers) {
    Accesses own;
    for (const auto& access : accesses)
      if (access.what->handler == handler) own.push_back(access);
    tell(*handler, own);
  }
}

void observe(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  observed.fetch_add(1, std::memory_order_relaxed);
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  Accesses accesses;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    note_all(arguments[i], alias != nullptr && alias->isWrite(), accesses);
  }
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kAccess);
  if (accesses.empty()) return op.redispatchBoxed(below, stack);
  bool tell_after = false;
  tell_each(accesses, [&](AccessHandler& handler, const Accesses& own) {
    handler.before({own.data(), own.size()}, schema.name());
    tell_after |= handler.wants_results();
  });
  for (const auto& access : accesses) tell_after |= access.writes;
  op.redispatchBoxed(below, stack);
  if (!tell_after) return;
  const auto results = torch::jit::last(*stack, schema.returns().size());
  tell_each(accesses, [&](AccessHandler& handler, const Accesses& own) {
    handler.after({own.data(), own.size()}, {results.data(), results.size()}, schema.name());
  });
}

// These make a view or read only the shape; they touch no data, so they must not gather.
constexpr const char* kViews[] = {"t",
                                  "view",
                                  "view.dtype",
                                  "transpose.int",
                                  "detach",
                                  "alias",
                                  "as_strided",
                                  "expand",
                                  "permute",
                                  "_reshape_alias",
                                  "_unsafe_view",
                                  "select.int",
                                  "slice.Tensor",
                                  "unsqueeze",
                                  "squeeze",
                                  "squeeze.dim",
                                  "squeeze.dims",
                                  "split.Tensor",
                                  "split_with_sizes",
                                  "unbind.int",
                                  "diagonal",
                                  "unfold",
                                  "view_as_real",
                                  "view_as_complex",
                                  "empty_like",
                                  "new_empty",
                                  "new_empty_strided",
                                  "is_same_size"};

}  // namespace

int64_t operators_observed() { return observed.load(std::memory_order_relaxed); }

void register_observer() {}

}  // namespace tessera

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&tessera::observe>()); }
TORCH_LIBRARY_IMPL(aten, Fake, m) {
  for (const char* view : tessera::kViews) m.impl(view, torch::CppFunction::makeFallthrough());
}
