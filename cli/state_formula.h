#pragma once

#include <cstdint>
#include <string>

namespace tessera::cli {

/// Bytes of one kind of model state on each rank: so many for each of the model's Ψ parameters, over so many ranks.
struct StateTerm {
  int64_t bytes_per_parameter = 0;
  int ranks = 1;  ///< that share it; 1: each has all of it

  double bytes(int64_t parameters) const { return static_cast<double>(bytes_per_parameter * parameters) / ranks; }
  std::string formula() const;  ///< "4Ψ" or "4Ψ/2"
};

/// What a placement costs by the arithmetic of Rajbhandari et al. 2020 (ZeRO), section 3.1 and figure 1, padding left out.
struct StateFormula {
  StateTerm parameters, gradients, optimizer;

  double bytes(int64_t count) const { return parameters.bytes(count) + gradients.bytes(count) + optimizer.bytes(count); }
};

/// Working parameters and gradients take 4 bytes in "fp32" and 2 in "bf16". AdamW's two moments take 8; with bf16 working
/// parameters the fp32 master weights, which are the optimizer's, another 4. Throws ConfigError for a placement or type of
/// another name.
StateFormula state_formula(const std::string& placement, const std::string& dtype, const std::string& gradient_dtype,
                           int ranks);

}  // namespace tessera::cli
