"""zero3 against ranks that do the same work and exchange nothing."""
from harness.table import at_most, median, number, ratio, spread, table
from harness.works import PLACEMENTS, RANKS

TITLE = "What sharding costs: zero3 over the floor"
ZERO3 = PLACEMENTS[0]
NAMES = {"end": "floor, update after backward", "backward": "floor, update within backward", ZERO3: "tessera zero3"}
# Each pair both ways around, and drift cancels: a palindrome.
ORDER = ("end", ZERO3, "backward", "backward", ZERO3, "end")
PHASES = ("forward", "backward", "optimizer", "gather_wait", "reduce_wait")


def measure(runner, plan):
    runner.begin("floor", plan.floor_repeats * len(ORDER))
    repeats = []
    for repeat in range(plan.floor_repeats):
        medians, phases = {key: [] for key in NAMES}, []
        for place, key in enumerate(ORDER):
            name = f"{repeat + 1}-{place + 1}-{key}"
            run = runner.attempt(name, lambda key=key, name=name: _one(runner, plan, key, name))
            medians[key].append(run and run.step_ms)
            if run and key == ZERO3:
                phases.append({phase: sum(rank["phases_ms"][phase] for rank in run.raw["per_rank"]) / RANKS for phase in PHASES})
        repeats.append({"step_ms": {key: _mean(values) for key, values in medians.items()},
                        "phases": {phase: median([each[phase] for each in phases]) for phase in PHASES}})
    return {"work": plan.work_b.describe(), "steps": plan.floor_steps, "repeats": repeats}


def _one(runner, plan, key, name):
    if key == ZERO3:
        return runner.tessera(name, plan.work_b, ZERO3, plan.floor_steps)
    return runner.floor(name, plan.work_b, key, plan.floor_steps)


def _mean(values):
    return None if None in values else sum(values) / len(values)


def report(numbers):
    """Markdown and targets."""
    repeats = numbers["repeats"]
    times = {key: [repeat["step_ms"][key] for repeat in repeats] for key in NAMES}
    ratios = {key: [ratio(repeat["step_ms"][ZERO3], repeat["step_ms"][key]) for repeat in repeats] for key in NAMES}
    rows = [(name, number(median(times[key]), 1), spread(times[key], 1), number(median(ratios[key]), 3), spread(ratios[key], 3))
            for key, name in NAMES.items()]
    phases = ", ".join(f"{phase.replace('_', ' ')} {number(median([r['phases'][phase] for r in repeats]), 1)}" for phase in PHASES)
    text = [f"{numbers['work']}, {RANKS} ranks, 1 thread each, fp32. The floor is {RANKS} processes that train this model side by side "
            "with no communication, with the arenas and the AdamW kernel that training uses, over half of the elements. It updates "
            "after backward, as the target says; the second row does it as soon as a gradient is there, which is what zero3 does. "
            "Unlike ours, each of its processes keeps all parameters to itself, so it reads more memory.",
            table(("", "ms a step", "repeats", "zero3 / this", "repeats"), rows),
            f"Each repeat is the mean of two runs, in the order {', '.join(_short(key) for key in ORDER)}, each the median of "
            f"{numbers['steps']} steps (the floor's: mean over its ranks). In zero3's step, ms (waits are within the others, the "
            f"fused update within backward): {phases}."]
    return "\n\n".join(text), [at_most("zero3 step ≤ 1.03 × floor", 1.03, median(ratios["end"]), ratios["end"])]


def _short(key):
    return key if key == ZERO3 else f"floor ({key})"
