#!/usr/bin/env bash
# lint.sh format      formats all sources in place
# lint.sh quick       format and the ladder of includes; seconds
# lint.sh check       format, ladder of includes, and clang-tidy over the files that include no costly header of libtorch
# lint.sh check-all   the same with clang-tidy over all files
set -euo pipefail
cd "$(dirname "$0")/.."
mode=$1

# Versions differ in where they break lines: the one that the sources were formatted with, if it is there.
if ! format=$(command -v clang-format-14 || command -v clang-format); then
  echo "clang-format is not installed; 'make format' and 'make lint' install it, or: apt-get install clang-format-14" >&2
  exit 1
fi
mapfile -t sources < <(find tessera models cli tests bench examples cmake \( -name '*.h' -o -name '*.cpp' \) | sort)

if [[ $mode == format ]]; then
  "$format" -i "${sources[@]}"
  exit 0
fi

status=0
scripts/check_includes.py || status=1
"$format" --dry-run --Werror "${sources[@]}" || status=1
if [[ $mode == quick ]]; then exit $status; fi

tidy=$(command -v clang-tidy-14 || command -v clang-tidy)
database=build/release/compile_commands.json
# Files compiled with a precompiled header are those that include costly ones.
mapfile -t checked < <(python3 - "$database" "$mode" <<'PYTHON'
import json, os, sys
database, mode = sys.argv[1:]
for entry in json.load(open(database)):
    ours = os.path.relpath(entry["file"])
    if not ours.startswith((".", "build")) and (mode == "check-all" or "cmake_pch" not in entry["command"]):
        print(ours)
PYTHON
)
# The database has g++'s arguments; clang-tidy need not understand those that don't change what it reads.
printf '%s\0' "${checked[@]}" | xargs -0 -n 1 -P "${JOBS:-$(scripts/jobs.sh)}" \
  "$tidy" -p build/release --quiet --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-optimization-argument \
  --extra-arg=-fno-openmp 2> >(grep -v "warnings generated" >&2) || status=1
exit $status
