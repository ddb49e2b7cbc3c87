#!/usr/bin/env bash
# one.sh PEER JSON [peer.py's arguments]: one run of a peer, 1 thread a rank, Gloo on loopback.
# PYTHON (default python3) has torch 2.13.0, and deepspeed for ds*; TMO (default 240) is its limit in seconds.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
peer=$1 json=$2
shift 2
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo DS_ACCELERATOR=cpu TORCH_CPP_LOG_LEVEL=ERROR PYTHONWARNINGS=ignore
python=$(command -v "${PYTHON:-python3}")
PATH=$(dirname "$python"):$PATH  # DeepSpeed builds its kernels with its environment's ninja
export PATH
ranks=2
if [[ $peer == single ]]; then ranks=1; fi
exec timeout "${TMO:-240}" "$python" -m torch.distributed.run --standalone --nproc-per-node $ranks \
  "$here/peer.py" --peer "$peer" --json "$json" "$@"
