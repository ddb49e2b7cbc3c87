"""Starts one program at a time, keeps what it said, and notes how much of the machine others used meanwhile."""
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from harness.works import RANKS, WARMUP

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS = ROOT / "bench" / "peers"


class RunError(Exception):
    """A program that failed, or did not end in time; the message has its last lines."""


@dataclass
class Training:
    """One run of training, by whichever program."""

    step_ms: float  # median of the timed steps
    tokens_per_second: float
    raw: dict = field(repr=False)
    others_percent: float = 0.0


def _busy_seconds():
    """Busy seconds of all processors, and those of them that the hypervisor gave to others."""
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return 0.0, 0.0
    steal = fields[7] if len(fields) > 7 else 0
    return (sum(fields[:3]) + sum(fields[5:7]) + steal) / os.sysconf("SC_CLK_TCK"), steal / os.sysconf("SC_CLK_TCK")


def _own_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Runner:
    """`build` has bin/tessera and bench/…; raw results and logs go to `output`/<section>."""

    def __init__(self, build, output, python):
        self.build, self.output, self.python = Path(build).resolve(), Path(output), python
        self.deepspeed, self.no_deepspeed = None, ""  # the Python that has it, or why there is none
        self.section, self.total, self.done, self.failures = "", 0, 0, []
        self.started = time.monotonic()
        self.others = []  # percent, of each run of the present section

    def begin(self, section, runs):
        """The next `runs` runs are of this section."""
        self.section, self.total, self.done, self.others = section, runs, 0, []
        (self.output / section).mkdir(parents=True, exist_ok=True)
        self.say(f"{runs} runs")

    def say(self, words):
        spent = int(time.monotonic() - self.started)
        print(f"[{spent // 60:02d}:{spent % 60:02d} {self.section}] {words}", file=sys.stderr, flush=True)

    def attempt(self, name, run, own=True):
        """run() with a line of progress before and after it; None if it failed. An own program that fails fails the whole."""
        self.done += 1
        self.say(f"{self.done}/{self.total} {name} …")
        try:
            result = run()
        except RunError as error:
            self.say(f"{self.done}/{self.total} {name} FAILED: {error}")
            self.failures.append((self.section, name, str(error), own))
            return None
        if isinstance(result, Training):
            self.others.append(result.others_percent)
            self.say(f"{self.done}/{self.total} {name}: {result.step_ms:.1f} ms a step, {result.tokens_per_second:.1f} tokens/s; "
                     f"others took {result.others_percent:.0f} % of the busy time")
        return result

    def noise(self):
        """What other processes took of the machine's busy time during this section's runs, as words."""
        if not self.others:
            return ""
        return f"other processes took {min(self.others):.0f} to {max(self.others):.0f} % of the machine's busy time"

    def execute(self, name, command, environment=None, limit_s=600):
        """Runs `command`; returns its standard output and what others took of the busy time, in percent. Throws RunError."""
        values = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        values.update(environment or {})
        busy, _ = _busy_seconds()
        own = _own_seconds()
        log = self.output / self.section / f"{name}.log"
        with open(log, "wb") as errors, tempfile.TemporaryFile() as out:
            process = subprocess.Popen([str(word) for word in command], stdout=out, stderr=errors, env=values, cwd=ROOT)
            try:
                status = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.terminate()  # a launcher ends its ranks
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                raise RunError(f"took longer than {limit_s} s; see {log}") from None
            except BaseException:
                process.terminate()
                process.wait()
                raise
            out.seek(0)
            words = out.read().decode(errors="replace")
        if status != 0:
            raise RunError(f"exit status {status}; {last_lines(log)} (all of it: {log})")
        busy, own = _busy_seconds()[0] - busy, _own_seconds() - own
        return words, 100 * max(0.0, 1 - own / busy) if busy > 0 else 0.0

    def keep(self, name, raw):
        path = self.output / self.section / f"{name}.json"
        path.write_text(json.dumps(raw) + "\n")

    def tessera(self, name, work, placement, steps, more=()):
        """`tessera train` with `steps` timed steps."""
        command = [self.build / "bin" / "tessera", "train", "--data", "random", *work.tessera(), "--steps", WARMUP + steps,
                   "--ranks", RANKS, "--threads-per-rank", 1, "--placement", placement, "--show", "nothing", *more, "--json", "-"]
        words, others = self.execute(name, command)
        raw = parsed(words)
        step_ms = statistics.median(raw["step_ms"][WARMUP:])
        self.keep(name, dict(raw, others_percent=others))
        return Training(step_ms, work.tokens_per_step(RANKS) / step_ms * 1e3, raw, others)

    def floor(self, name, work, update, steps):
        """The ranks side by side without communication. A step's time is the mean of the ranks' medians."""
        program = self.build / "bench" / "floor"
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "floor.json"
            command = [self.build / "bin" / "tessera", "launch", "-n", RANKS, "--", program, *work.tessera(), "--steps",
                       WARMUP + steps, "--update", update, "--json", result]
            _, others = self.execute(name, command)
            raw = parsed(result.read_text())
        self.keep(name, dict(raw, others_percent=others))
        step_ms = statistics.mean(statistics.median(rank["step_ms"][WARMUP:]) for rank in raw["per_rank"])
        return Training(step_ms, work.tokens_per_step(RANKS) / step_ms * 1e3, raw, others)

    def peer(self, name, work, peer, steps, python=None, environment=None):
        """A peer of bench/peers/peer.py."""
        values = dict(environment or {}, PYTHON=str(python or self.python), TMO="500",
                      TORCH_EXTENSIONS_DIR=str(self.output / "torch_extensions"))
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "peer.json"
            command = [PEERS / "one.sh", peer, result, *work.peer(), "--steps", steps, "--warmup", WARMUP]
            _, others = self.execute(name, command, values)
            raw = parsed(result.read_text())
        self.keep(name, dict(raw, others_percent=others))
        return Training(raw["step_ms_median"], raw["tokens_per_step"] / raw["step_ms_median"] * 1e3, raw, others)


def parsed(words):
    try:
        return json.loads(words)
    except ValueError:
        raise RunError(f"this is not the JSON that it should be: {words[:200]!r}") from None


def last_lines(log, count=3):
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-count:]) if lines else "it said nothing"
