#!/usr/bin/env bash
# configure.sh PRESET: configures build/PRESET, if it isn't yet or was for another libtorch.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
libtorch=$(scripts/find_libtorch.sh)
cache=build/$preset/CMakeCache.txt
if [[ -f build/$preset/build.ninja ]] && grep -qxF "Torch_DIR:PATH=$libtorch" "$cache"; then exit 0; fi
compiler=()
if [[ $preset == sanitize && -z "${CXX:-}" ]] &&
   clang++-19 -fsanitize=address,undefined -x c++ -o /dev/null - <<< 'int main() {}' 2> /dev/null; then
  compiler=(-DCMAKE_CXX_COMPILER=clang++-19)
fi
# Everything CMake remembers about libtorch is stale when that has changed.
exec cmake --preset "$preset" --fresh -Wno-dev -DTorch_DIR:PATH="$libtorch" "${compiler[@]}"
