"""What the size of units and keeping them after forward cost and save."""
from harness.peers import mib_over_base
from harness.table import median, number, spread, table
from harness.works import PLACEMENTS

TITLE = "Size of units, work b"
ZERO3 = PLACEMENTS[0]
MIB = 2**20
CASES = {"1 block": ("block", "nothing"), "2 blocks": ("2", "nothing"), "4 blocks": ("4", "nothing"), "whole model": ("model", "nothing"),
         "1 block, root kept after forward": ("block", "root"), "1 block, all kept after forward": ("block", "all")}


def measure(runner, plan):
    runner.begin("units", plan.rounds * len(CASES))
    found = {case: {"step_ms": [], "mib": [], "lent_mib": []} for case in CASES}
    for turn in range(plan.rounds):
        for place, (case, (units, kept)) in enumerate(CASES.items()):
            name = f"{turn + 1}-{place + 1}"
            run = runner.attempt(name, lambda: runner.tessera(name, plan.work_b, ZERO3, plan.peer_steps,
                                                              ("--units", units, "--kept", kept)))
            found[case]["step_ms"].append(run and run.step_ms)
            found[case]["mib"].append(run and mib_over_base(run.raw))
            found[case]["lent_mib"].append(run and max(rank["bytes"]["communication_buffers"] for rank in run.raw["per_rank"]) / MIB)
    return {"work": plan.work_b.describe(), "cases": found}


def report(numbers):
    """Markdown; no targets."""
    rows = [(case, number(median(values["step_ms"]), 1), spread(values["step_ms"], 1), number(median(values["mib"])),
             spread(values["mib"]), number(median(values["lent_mib"]), 1)) for case, values in numbers["cases"].items()]
    text = (f"{numbers['work']}, zero3 on 2 ranks. Gradients are handed over by unit, so larger units hold more of them at once; a "
            "gathered unit takes no memory of its own here, since the ranks of one host share one copy, and a gather is a check of one "
            "number a rank. So units of one block are the default, and keeping units after forward saves next to nothing.")
    return "\n\n".join([text, table(("unit", "ms a step", "rounds", "sum of ranks, MiB over base", "rounds",
                                     "most gradients handed over at once a rank, MiB"), rows)]), []
