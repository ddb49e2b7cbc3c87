#include "tests/support/deferred_helpers.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

namespace tessera::test {

using torch::Tensor;

bool has_values(const Tensor& tensor) {
  try {
    return tensor.numel() == 0 || tensor.const_data_ptr() != nullptr;
  } catch (const c10::Error&) {
    return false;
  }
}

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.sizes() != b.sizes() || a.strides() != b.strides() || a.scalar_type() != b.scalar_type()) return false;
  const Tensor first = a.contiguous(), second = b.contiguous();
  return a.numel() == 0 || std::memcmp(first.const_data_ptr(), second.const_data_ptr(), first.nbytes()) == 0;
}

Named registered(const torch::nn::Module& module) {
  Named tensors;
  for (const auto& item : module.named_parameters()) tensors[item.key()] = item.value().detach();
  for (const auto& item : module.named_buffers()) tensors[item.key()] = item.value();
  return tensors;
}

void expect_equal(const Named& wanted, const Named& got) {
  ASSERT_EQ(wanted.size(), got.size());
  for (const auto& [name, value] : wanted) EXPECT_TRUE(got.contains(name) && same_bits(got.at(name), value)) << name;
}

Both both(const Build& build) {
  torch::manual_seed(7);
  Both made{build(), nullptr};
  const Tensor next = torch::rand({5});
  torch::manual_seed(7);
  made.deferred = tessera::deferred(build);
  EXPECT_TRUE(torch::equal(torch::rand({5}), next)) << "the random stream goes on differently";
  for (const auto& item : made.deferred->named_parameters())
    EXPECT_TRUE(item.value().numel() == 0 || item.key().starts_with("real ") || !has_values(item.value()))
        << item.key() << " took memory";
  const auto wanted = made.eager->named_parameters();
  for (const auto& item : made.deferred->named_parameters()) {
    EXPECT_EQ(item.value().requires_grad(), wanted[item.key()].requires_grad()) << item.key();
    EXPECT_EQ(item.value().sizes(), wanted[item.key()].sizes()) << item.key();
    EXPECT_TRUE(item.value().is_leaf() && item.value().device().is_cpu()) << item.key();
  }
  return made;
}

void expect_materialized_as_eager(const Build& build) {
  const auto made = both(build);
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  materialize(*made.deferred);
  EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), state)) << "replaying moved the generator";
  expect_equal(registered(*made.eager), registered(*made.deferred));
}

Named whole(const Sharded& sharded, const torch::nn::Module& module) {
  Named tensors;
  for (const auto& [name, value] : sharded.full_parameters()) tensors[name] = value;
  for (const auto& item : module.named_buffers()) tensors[item.key()] = item.value();
  return tensors;
}

namespace {

Named once(const torch::nn::Module& module) {
  Named tensors;
  std::set<const at::TensorImpl*> seen;
  for (const auto& item : module.named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) tensors[item.key()] = item.value().detach().contiguous();
  for (const auto& item : module.named_buffers()) tensors[item.key()] = item.value();
  return tensors;
}

}  // namespace

void expect_sharded_as_eager(const Build& build, const UnitPolicy& units, std::initializer_list<int> ranks) {
  for_every_placement(
      [&](const World& world, const Placements& placements) {
        for (const auto initial : {Initial::verify, Initial::broadcast}) {
          const auto made = both(build);
          auto sharded = fully_shard(*made.deferred, mesh_for(world, placements),
                                     {.placements = placements, .units = units, .initial = initial});
          expect_equal(once(*made.eager), whole(sharded, *made.deferred));
        }
      },
      ranks);
}

}  // namespace tessera::test
