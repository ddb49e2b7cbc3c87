#include "cli/state_formula.h"

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/layout/placements.h"

namespace tessera::cli {
namespace {

constexpr int64_t kMoments = 8, kMaster = 4;

int64_t size_of_type(const std::string& dtype) {
  if (dtype == "fp32") return 4;
  if (dtype == "bf16") return 2;
  throw ConfigError(text("the type of parameters and gradients must be fp32 or bf16, but is '", dtype, "'"));
}

}  // namespace

std::string StateTerm::formula() const {
  return ranks == 1 ? text(bytes_per_parameter, "Ψ") : text(bytes_per_parameter, "Ψ/", ranks);
}

StateFormula state_formula(const std::string& placement, const std::string& dtype, const std::string& gradient_dtype,
                           int ranks) {
  const Placements placements = placements_named(placement);
  const auto shared_by = [&](Placement where) { return where == Placement::sharded ? ranks : 1; };
  const int64_t working = size_of_type(dtype);
  return {{working, shared_by(placements.parameter)},
          {size_of_type(gradient_dtype), shared_by(placements.gradient)},
          {working == 4 ? kMoments : kMoments + kMaster, shared_by(placements.optimizer)}};
}

}  // namespace tessera::cli
