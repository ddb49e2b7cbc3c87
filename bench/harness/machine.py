"""What the numbers were measured on."""
import datetime
import json
import os
import re
import subprocess
from pathlib import Path

from harness.runner import ROOT

SIMD = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve", "sve2")


def _contents(path):
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _field(text, *names):
    for name in names:
        found = re.search(rf"^{name}\s*[:=]\s*\"?([^\"\n]*)", text, re.MULTILINE)
        if found:
            return found.group(1).strip()
    return ""


def _said(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit():
    """The commit of the sources, with a + if they were changed since; '' outside of a repository."""
    name = _said("git", "rev-parse", "--short", "HEAD")
    return name + ("+" if name and _said("git", "status", "--porcelain", "--untracked-files=no") else "")


def _mode(name):
    """What is chosen among the modes, which the kernel marks by brackets."""
    found = re.search(r"\[(\w+)\]", _contents(f"/sys/kernel/mm/transparent_hugepage/{name}"))
    return found.group(1) if found else "unknown"


def _caches():
    sizes = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if _contents(index / "type") != "Instruction":
            sizes.append(f"L{_contents(index / 'level')} {_contents(index / 'size')}")
    return ", ".join(sizes)


def _libtorch(build):
    try:
        found = json.loads(_said(str(build / "bin" / "tessera"), "doctor", "--json", "-"))["libtorch"]
        return f"{found['loaded']}, {found['blas']}, kernels for {found['cpu_kernels']}"
    except (ValueError, KeyError, TypeError):
        return "unknown"


def describe(build, torch):
    """Name and value of each line, in order."""
    cpu, memory = _contents("/proc/cpuinfo"), _contents("/proc/meminfo")
    flags = set(_field(cpu, "flags", "Features").split())
    kibibytes = _field(memory, "MemTotal").split()
    virtual = " (virtual machine)" if "hypervisor" in flags else ""
    return {
        "processor": (_field(cpu, "model name", "CPU part") or "unknown") + virtual,
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "SIMD": ", ".join(flag for flag in SIMD if flag in flags),
        "caches": _caches(),
        "memory": f"{int(kibibytes[0]) / 2**20:.1f} GiB" if kibibytes else "unknown",
        "huge pages": f"anonymous {_mode('enabled')}, shared {_mode('shmem_enabled')}",
        "system": f"{_field(_contents('/etc/os-release'), 'PRETTY_NAME')}, Linux {os.uname().release}",
        "libtorch": _libtorch(build),
        "the peers' torch": torch or "none",
        "date": datetime.date.today().isoformat(),
    }
