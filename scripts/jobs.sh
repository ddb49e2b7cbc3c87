#!/usr/bin/env bash
# Prints how many compilers may run at once: one a core, and no more than memory holds (libtorch's headers take 2 GiB each).
set -euo pipefail
cores=$(nproc)
fitting=$(awk '/^MemAvailable:/ { print int($2 / (2 * 1024 * 1024)) }' /proc/meminfo)
jobs=$((fitting < cores ? fitting : cores))
echo $((jobs < 1 ? 1 : jobs))
