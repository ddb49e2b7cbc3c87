"""The kernels beside what memory itself can do."""
import os
import subprocess

from harness.runner import PEERS, RunError, parsed
from harness.table import median, number, table
from harness.works import RANKS

TITLE = "Kernels and memory"


def measure(runner, plan):
    runner.begin("kernels", 1 + RANKS)
    kernels = runner.attempt("kernels", lambda: _kernels(runner, plan)) or {}
    streams = {processes: runner.attempt(f"stream-{processes}", lambda: _stream(runner, plan, processes), own=False) or {}
               for processes in range(1, RANKS + 1)}
    return {"repeats": plan.kernel_repeats, "kernels": kernels, "streams": streams}


def _kernels(runner, plan):
    command = [runner.build / "bench" / "kernels_bench", "--benchmark_format=json",
               f"--benchmark_repetitions={plan.kernel_repeats}", "--benchmark_enable_random_interleaving=true"]
    if plan.name == "smoke":
        command.append("--benchmark_min_time=0.01")
    words, others = runner.execute("kernels", command)
    runner.others.append(others)
    raw = parsed(words)
    runner.keep("kernels", raw)
    runs = {}
    for run in raw["benchmarks"]:
        if run.get("run_type") == "iteration":
            runs.setdefault(run["run_name"].split("/repeats")[0], []).append(run)
    return {name: {"gb_per_second": [run["GB/s"] for run in each], "ns_per_parameter": [run["ns/parameter"] for run in each]}
            for name, each in runs.items()}


def _stream(runner, plan, processes):
    program = runner.output / "membw"
    try:
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-o", program, PEERS / "membw.c"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RunError(f"membw.c can't be compiled: {getattr(error, 'stderr', '') or error}") from None
    words, others = runner.execute(f"stream-{processes}", [program, "stream", plan.stream_bytes, 5, processes])
    runner.others.append(others)
    return {line.split()[0]: [float(word) for word in line.split()[1:]] for line in words.splitlines()}


def report(numbers):
    """Markdown and targets."""
    kernels, streams = numbers["kernels"], numbers["streams"]
    rows = [(f"`{name}`", number(median(each["ns_per_parameter"]), 2), number(median(each["gb_per_second"]), 1),
             number(max(each["gb_per_second"]), 1)) for name, each in sorted(kernels.items())]
    memory = [(f"`{kind}`", *(f"{number(median(streams[n].get(kind, [])), 1)} / {number(max(streams[n].get(kind, [0])), 1)}" for n in streams))
              for kind in next(iter(streams.values()), {})]
    text = [f"One thread, arrays that fit no cache; GB/s of what must be read and written, medians of {numbers['repeats']} repetition(s), "
            "interleaved. `sum/…` adds up the ranks' gradients; `adamw/…` does that and AdamW in the same pass.",
            table(("kernel", "ns a parameter", "GB/s", "best"), rows),
            "Memory alone, counted as STREAM counts (nothing for what a plain write reads first; `nt` stores past the caches), GB/s, "
            "median / best:",
            table(("", *(f"{n} process{'es' if int(n) > 1 else ''}" for n in streams)), memory)]
    return "\n\n".join(text), []
