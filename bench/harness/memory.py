"""What training takes over libtorch alone: our proportional set sizes beside FSDP2's resident ones."""
from harness.peers import mib_over_base
from harness.table import at_most, median, number, ratio, spread, table, target
from harness.works import PLACEMENTS

TITLE = "Memory, work b"
FSDP2, FSDP2_MMAP = "PyTorch FSDP2", "PyTorch FSDP2, MALLOC_MMAP_THRESHOLD_=65536"
MIB = 2**20
ROLES = ("parameters", "gradients", "optimizer", "padding", "communication_buffers")


def measure(runner, plan):
    peers = (FSDP2, FSDP2_MMAP) if runner.python else ()
    runner.begin("memory", plan.memory_rounds * (len(PLACEMENTS) + len(peers)))
    sums = {key: [] for key in PLACEMENTS + peers}
    roles = {}
    for turn in range(plan.memory_rounds):
        for placement in PLACEMENTS:
            name = f"{turn + 1}-{placement}"
            run = runner.attempt(name, lambda: runner.tessera(name, plan.work_b, placement, plan.memory_steps))
            sums[placement].append(run and mib_over_base(run.raw))
            if run:
                roles[placement] = {role: max(rank["bytes"][role] for rank in run.raw["per_rank"]) / MIB for role in ROLES}
        for peer in peers:
            name = f"{turn + 1}-fsdp2" + ("-mmap" if peer == FSDP2_MMAP else "")
            environment = {"MALLOC_MMAP_THRESHOLD_": "65536"} if peer == FSDP2_MMAP else {}
            run = runner.attempt(
                name, lambda: runner.peer(name, plan.work_b, "fsdp2", plan.memory_steps, environment=environment), own=False)
            sums[peer].append(run and mib_over_base(run.raw))
    return {"work": plan.work_b.describe(), "mib": sums, "roles_mib": roles}


def report(numbers):
    """Markdown and targets."""
    mib, roles = numbers["mib"], numbers["roles_mib"]
    rows = []
    for key, values in mib.items():
        by_role = [number(roles[key][role], 1) for role in ROLES] if key in roles else ["–"] * len(ROLES)
        rows.append((f"**tessera {key}**" if key in PLACEMENTS else key, number(median(values)), spread(values), *by_role))
    text = [f"{numbers['work']}. Peak over what the processes had before they built the model, summed over the ranks, MiB. Ours is the "
            "proportional set size, since the ranks share pages, sampled every 10 ms in the first steps; FSDP2's ranks share next to "
            "nothing beyond what libtorch alone takes, and theirs is the kernel's peak of the resident size. Beside it a rank's "
            "bytes by role, as `tessera train --json` has them: state only, without activations.",
            table(("", "sum of ranks, MiB", "rounds", *(f"{role.replace('_', ' ')} a rank" for role in ROLES)), rows)]
    return "\n\n".join(text), _targets({key: median(values) for key, values in mib.items()})


def _targets(mib):
    zero3, fsdp2, mmap = mib["zero3"], mib.get(FSDP2), mib.get(FSDP2_MMAP)
    targets = [at_most("zero3's memory over base ≤ 0.5 × FSDP2's", 0.5, ratio(zero3, fsdp2)),
               at_most("zero3's memory over base ≤ FSDP2's with MALLOC_MMAP_THRESHOLD_=65536", 1.0, ratio(zero3, mmap))]
    ordered = [mib[placement] for placement in PLACEMENTS]
    known = None not in ordered
    return targets + [target("zero3 < zero2 < zero1 < ddp, measured", " < ".join(number(value) for value in ordered) + " MiB" if known and
                             ordered == sorted(ordered) else ", ".join(number(value) for value in ordered) + " MiB",
                             all(a < b for a, b in zip(ordered, ordered[1:])) if known else None)]
