#!/usr/bin/env bash
# Makes everything that a build needs present: tools, libraries, libtorch. Does nothing, in a fraction of a second, where it
# all is there. As root it installs what is missing with apt; otherwise it prints the one line to run, and stops.
# --lint: also the tools of `make lint`. --sanitize: also clang 19, which builds the sanitized tests in a third of g++'s time.
# TESSERA_PIP_ARGS: more arguments for the `pip install` of libtorch, such as the index of its CPU wheels.
set -euo pipefail
cd "$(dirname "$0")/.."

torch_version=2.13.0
cxx=${CXX:-c++}

# Each is asked for by what is used of it, so that one installed by other means counts. Package, then command or header.
commands=(cmake:cmake ninja-build:ninja)
headers=(nlohmann-json3-dev:nlohmann/json.hpp libcli11-dev:CLI/CLI.hpp libtomlplusplus-dev:toml++/toml.h
         libgtest-dev:gtest/gtest.h libbenchmark-dev:benchmark/benchmark.h libhwy-dev:hwy/highway.h
         libxxhash-dev:xxhash.h libsentencepiece-dev:sentencepiece_processor.h)
# Only make it faster.
helpful=(ccache:ccache)

if [[ "${1:-}" == --lint ]]; then commands+=(clang-format:clang-format clang-tidy:clang-tidy); fi

if [[ "${1:-}" == --sanitize ]]; then helpful+=(clang-19:clang++-19 libclang-rt-19-dev:clang++-19); fi

missing_commands() {
  local entry
  for entry in "$@"; do command -v "${entry#*:}" > /dev/null || echo "${entry%%:*}"; done
}

missing_headers() {
  local entry
  for entry in "$@"; do
    printf '#if !__has_include(<%s>)\nmissing: %s\n#endif\n' "${entry#*:}" "${entry%%:*}"
  done | "$cxx" -std=c++20 -E -P -x c++ - | sed -n 's/^missing: \(.*\)/\1/p' | tr -d ' '
}

missing_for_libtorch() {
  if [[ -z "$libtorch" ]] && ! python3 -c 'import ensurepip, venv' 2> /dev/null; then echo python3-venv; fi
}

require_compiler() {
  if ! command -v "$cxx" > /dev/null; then
    echo "No C++ compiler: '$cxx' is not on the PATH. Install one (Debian, Ubuntu: apt-get install -y g++) or set CXX." >&2
    exit 1
  fi
  if ! echo '#include <concepts>' | "$cxx" -std=c++20 -E -x c++ - > /dev/null 2>&1; then
    echo "The C++ compiler '$cxx' ($("$cxx" --version | head -n 1)) has no C++20 library. g++ 12 or clang++ 19 or newer is" \
         "needed. Set CXX to one." >&2
    exit 1
  fi
}

# install PACKAGES...: with apt as root, otherwise says how and stops.
install() {
  if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
    echo "These packages are missing. Install them with this line, then run the same command again:" >&2
    echo "  sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends $*'" >&2
    exit 1
  fi
  echo "Installing $*"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

install_packages() {
  local needed wished=()
  mapfile -t needed < <(missing_commands "${commands[@]}"; missing_headers "${headers[@]}"; missing_for_libtorch)
  if [[ $(id -u) == 0 ]] || [[ ${#needed[@]} -gt 0 ]]; then
    mapfile -t wished < <(missing_commands "${helpful[@]}")
  fi
  # shellcheck disable=SC2206  # an entry that became empty must vanish
  local all=(${needed[@]} ${wished[@]})
  if [[ ${#all[@]} -gt 0 ]]; then install "${all[@]}"; fi
}

install_libtorch() {
  echo "No libtorch 2.11 or newer found: installing torch $torch_version into .deps/venv"
  [[ -x .deps/venv/bin/pip ]] || python3 -m venv .deps/venv
  local wheel
  wheel=$(available_wheel)
  # shellcheck disable=SC2086  # arguments, to be split
  .deps/venv/bin/pip install --quiet --disable-pip-version-check ${TESSERA_PIP_ARGS:-} "torch==$wheel" numpy
}

# The version to ask pip for. An index that has no CPU wheel by name may have one under the plain version; but the one that
# needs gigabytes of CUDA packages, and then a CUDA compiler to build with, is not what a plain `make` should fetch.
available_wheel() {
  local report wheel
  for wheel in "$torch_version+cpu" "$torch_version"; do
    # shellcheck disable=SC2086
    report=$(.deps/venv/bin/pip install --quiet --disable-pip-version-check --dry-run --ignore-installed --report - \
             ${TESSERA_PIP_ARGS:-} "torch==$wheel" 2> /dev/null) || continue
    if ! grep -q '"nvidia' <<< "$report"; then echo "$wheel"; return 0; fi
  done
  echo "pip finds no CPU wheel of torch $torch_version. Give pip the index of PyTorch's CPU wheels (\"Get started\" on PyTorch's" \
       "site names it): TESSERA_PIP_ARGS='--extra-index-url URL' make. Or set TESSERA_LIBTORCH to an unpacked libtorch." >&2
  return 1
}

status=0
libtorch=$(scripts/find_libtorch.sh) || status=$?
if [[ $status -gt 1 ]]; then exit 1; fi
require_compiler
install_packages
if [[ -z "$libtorch" ]]; then install_libtorch; fi
