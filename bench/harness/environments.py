"""The Pythons that the peers run in."""
import os
import subprocess
from pathlib import Path

from harness.runner import ROOT, RunError
from harness.works import SMOKE_WORK

DEEPSPEED = "0.19.8"


def _answers(python, statement):
    try:
        run = subprocess.run([str(python), "-c", statement], capture_output=True, text=True, timeout=120, check=True)
        return run.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def python_with_torch():
    """TESSERA_PYTHON, .deps/venv or python3, whichever first has torch with c10d; None if none has."""
    chosen = os.environ.get("TESSERA_PYTHON")
    candidates = [chosen] if chosen else [str(ROOT / ".deps/venv/bin/python"), "python3"]
    for python in candidates:
        if _answers(python, "import torch.distributed as d; assert d.is_available()") is not None:
            return python
    return None


def torch_version(python):
    return _answers(python, "import torch; print(torch.__version__)") if python else None


def deepspeed_python(python, make):
    """The Python of .deps/venv-deepspeed, which has DeepSpeed beside the torch of `python`. With `make`, makes it if it isn't there.
    Returns it and why it is None."""
    folder = ROOT / ".deps" / "venv-deepspeed"
    own = folder / "bin" / "python"
    if _installed(own):
        return own, ""
    if not make:
        return None, "DeepSpeed's environment isn't there (a full run makes it, or: --deepspeed)"
    try:
        _make(python, folder, own)
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return None, f"DeepSpeed {DEEPSPEED} can't be installed here: {' / '.join(detail[-3:])}"
    return (own, "") if _installed(own) else (None, f"DeepSpeed {DEEPSPEED} is installed, but can't be imported")


def _installed(python):
    return _answers(python, "from importlib.metadata import version; import torch; print(version('deepspeed'))") == DEEPSPEED


def _make(python, folder, own):
    # The same torch for all: a second copy would be a second thing to compare. DeepSpeed's set-up asks for it, too.
    packages = _answers(python, "import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))")
    run = lambda *command: subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)  # noqa: E731
    run(python, "-m", "venv", "--clear", folder)
    site = Path(_answers(own, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    (site / "torch-of-the-project.pth").write_text(packages + "\n")
    pip = (own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "setuptools", "wheel", "ninja")
    run(*pip, "--no-build-isolation", f"deepspeed=={DEEPSPEED}")


def prepare_deepspeed(runner, python):
    """A run of no interest, in which DeepSpeed compiles its kernels. Returns why that fails, or ''."""
    try:
        runner.peer("deepspeed-prepares", SMOKE_WORK, "ds3", 1, python=python)
        return ""
    except RunError as error:
        return f"DeepSpeed {DEEPSPEED} does not run here: {error}"
