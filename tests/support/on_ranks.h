#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "tessera/mesh/world.h"

namespace tessera::test {

/// How one rank's process ended.
struct RankEnd {
  int exit_code = 0;  ///< if it ended by itself
  int signal = 0;     ///< if a signal ended it
  std::string error;  ///< what() of the exception that ended `body`, or ""
};

/// Runs `body` in `ranks` forked processes that find each other as under a launcher, and waits for all, at most `timeout`;
/// whoever still runs then is killed. Returns how each ended. The calling process must not have used more than one thread in
/// tensors.
std::vector<RankEnd> run_ranks(int ranks, const std::function<void(World)>& body,
                               std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// As run_ranks, but a rank that ends with an exception, a failed expectation or a signal fails the test, naming the rank.
void on_ranks(int ranks, const std::function<void(World)>& body,
              std::chrono::milliseconds timeout = std::chrono::seconds(60));

}  // namespace tessera::test
