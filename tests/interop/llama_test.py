"""  python3 llama_test.py interop_llama_test

Lets PyTorch train here and now, and the C++ test compare with that: on one machine, with one libtorch, kernels are the same,
so that the tight bounds hold which the committed golden file can't have."""
import os
import subprocess
import sys
import tempfile

import llama_witness

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        golden = os.path.join(folder, "llama.pt")
        llama_witness.write(golden, each_step=True)
        sys.exit(subprocess.run([sys.argv[1]], env=dict(os.environ, TESSERA_INTEROP_GOLDEN=golden)).returncode)
