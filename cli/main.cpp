#include <cstdio>
#include <exception>

#include "cli/command_line.h"
#include "tessera/base/error.h"

namespace {

int fail(const std::exception& error, int status) {
  std::fprintf(stderr, "tessera: %s\n", error.what());
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return tessera::cli::run_command_line(std::vector<std::string>(argv + (argc > 0 ? 1 : 0), argv + argc));
  } catch (const tessera::ConfigError& error) {
    return fail(error, 2);
  } catch (const std::exception& error) {
    return fail(error, 1);
  }
}
