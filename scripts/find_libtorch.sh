#!/usr/bin/env bash
# Prints the folder of the TorchConfig.cmake to build with, or exits with 1 where no libtorch is found, 2 where TESSERA_LIBTORCH is wrong.
# In this order: TESSERA_LIBTORCH, CMAKE_PREFIX_PATH, the torch of python3 on the PATH (2.11 or newer), .deps/venv.
set -euo pipefail
cd "$(dirname "$0")/.."

# The folder of TorchConfig.cmake below `prefix`: an unpacked libtorch, a Python torch, or its share/cmake.
config_below() {
  local folder
  for folder in "$1" "$1/Torch" "$1/cmake/Torch" "$1/share/cmake/Torch" "$1/lib/cmake/Torch"; do
    if [[ -f "$folder/TorchConfig.cmake" ]]; then (cd "$folder" && pwd); return 0; fi
  done
  return 1
}

if [[ -n "${TESSERA_LIBTORCH:-}" ]]; then
  config_below "$TESSERA_LIBTORCH" && exit 0
  echo "TESSERA_LIBTORCH is '$TESSERA_LIBTORCH', but there is no share/cmake/Torch/TorchConfig.cmake in it." \
       "Set it to the folder of an unpacked libtorch or of an installed Python torch, or unset it." >&2
  exit 2
fi

IFS=':;' read -ra prefixes <<< "${CMAKE_PREFIX_PATH:-}"
for prefix in "${prefixes[@]}"; do
  if [[ -n "$prefix" ]] && config_below "$prefix"; then exit 0; fi
done

# The version and place of python3's torch, without the second that importing it takes.
package=$(python3 - <<'PYTHON' || true
import importlib.metadata, importlib.util, os, re
try:
    version = importlib.metadata.version("torch")
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) >= (2, 11):
        print(os.path.dirname(importlib.util.find_spec("torch").origin))
except (ImportError, AttributeError):
    pass
PYTHON
)
if [[ -n "$package" ]] && config_below "$package"; then exit 0; fi

# pip writes RECORD last: an installation that was cut off has none.
for record in .deps/venv/lib/python*/site-packages/torch-*.dist-info/RECORD; do
  if [[ -f "$record" ]] && config_below "$(dirname "$record")/../torch"; then exit 0; fi
done
exit 1
