"""Tokens per second beside PyTorch and DeepSpeed, on the same shapes."""
from harness.table import at_least, median, number, ratio, spread, table, target
from harness.works import DEEPSPEED_PEERS, PLACEMENTS, RANKS

TITLES = {"peers-b": "Beside other programs, work b: bound by memory and communication",
          "peers-a": "Beside other programs, work a: bound by computation"}
PEER_NAMES = {"fsdp2": "PyTorch FSDP2", "fsdp1": "PyTorch FSDP1", "ddp": "PyTorch DDP",
              "zero1-torch": "PyTorch ZeroRedundancyOptimizer", "single": "PyTorch, one process, one core",
              "ds3": "DeepSpeed ZeRO-3", "ds2": "DeepSpeed ZeRO-2", "ds1": "DeepSpeed ZeRO-1"}
# What must be how many times as fast as what, on work b.
TARGETS_B = (("zero3", "fsdp2", 4.5), ("zero3", "ds3", 4.0), ("zero3", "single", 1.9), ("ddp", "ddp", 1.7))


def ours(placement):
    return f"tessera {placement}"


def measure(runner, plan, section):
    """Rounds over all programs, every other one backwards, so that a slow spell of the machine falls on all."""
    work = plan.work_b if section == "peers-b" else plan.work_a
    peers = (plan.peers if runner.python else ()) + (DEEPSPEED_PEERS if runner.deepspeed else ())
    order = _interleaved([ours(placement) for placement in PLACEMENTS], list(peers))
    runner.begin(section, plan.rounds * len(order))
    runs = {program: [] for program in order}
    for turn in range(plan.rounds):
        for program in order if turn % 2 == 0 else reversed(order):
            name = f"{turn + 1}-{program.replace(' ', '-')}"
            run = runner.attempt(name, lambda: _one(runner, plan, work, program, name), own=program not in peers)
            runs[program].append(run)
    return {"work": work.describe(), "parameters": work.parameters(), "steps": plan.peer_steps, "rounds": plan.rounds,
            "step_ms": {program: [run and run.step_ms for run in all_runs] for program, all_runs in runs.items()},
            "tokens_per_second": {program: [run and run.tokens_per_second for run in all_runs] for program, all_runs in runs.items()},
            "mib": {program: [run and mib_over_base(run.raw) for run in all_runs] for program, all_runs in runs.items()},
            "built": {program: _parameters(all_runs) for program, all_runs in runs.items()},
            "missing": _missing(runner)}


def _interleaved(first, second):
    mixed = []
    while first or second:
        mixed += first[:1] + second[:1]
        first, second = first[1:], second[1:]
    return mixed


def _one(runner, plan, work, program, name):
    if program in PEER_NAMES:
        python = runner.deepspeed if program in DEEPSPEED_PEERS else runner.python
        return runner.peer(name, work, program, plan.peer_steps, python=python)
    return runner.tessera(name, work, program.split()[1], plan.peer_steps)


def _parameters(runs):
    """How many parameters the program says that its model has."""
    return next((run.raw.get("parameters", run.raw.get("n_params")) for run in runs if run), None)


def mib_over_base(raw):
    """Peak over what was there before the model was built, summed over ranks: proportional set sizes of ours, resident of peers."""
    if "per_rank" in raw:
        return sum(rank["peak_pss_bytes"] - rank["base_pss_bytes"] for rank in raw["per_rank"]) / 2**20
    return sum(rank["hwm_over_base_mib"] for rank in raw["ranks"])


def _missing(runner):
    words = [] if runner.python else ["No Python with torch is here (TESSERA_PYTHON), so no peer was run."]
    if not runner.deepspeed:
        words.append(runner.no_deepspeed[:1].upper() + runner.no_deepspeed[1:] + ".")
    return words


def report(numbers, section):
    """Markdown and targets."""
    rates, times = numbers["tokens_per_second"], numbers["step_ms"]
    best = median(rates.get(ours("zero3"), []))
    ordered = sorted(rates, key=lambda program: -(median(rates[program]) or 0))
    rows = [(PEER_NAMES.get(program, f"**{program}**"), number(median(times[program])), spread(times[program]),
             number(median(rates[program]), 1), number(ratio(best, median(rates[program])), 2), number(median(numbers["mib"][program])))
            for program in ordered]
    text = [f"{numbers['work']}, {RANKS} ranks, 1 thread each, fp32, AdamW, no clipping. Medians of each run's median of "
            f"{numbers['steps']} steps over {numbers['rounds']} interleaved round(s). All build the same shapes and read as many tokens; "
            "the synthetic tokens themselves differ between ours and the peers' harness (bench/peers), and one process does the "
            "batches of both ranks one after another. Memory is the peak over what was there before the model, summed over the ranks (see "
            "Memory).",
            table(("", "ms a step", "rounds", "tokens/s", "zero3 is … times as fast", "memory, MiB"), rows)]
    odd = [f"{PEER_NAMES.get(program, program)} has {count}" for program, count in numbers["built"].items()
           if count not in (None, numbers["parameters"])]
    if odd:
        text.append(f"Not the same work: instead of {numbers['parameters']} parameters, {', '.join(odd)}.")
    text += numbers["missing"]
    failed = [PEER_NAMES.get(program, program) for program in rates if None in rates[program]]
    if failed:
        text.append(f"Runs of these failed, and are left out: {', '.join(failed)}.")
    return "\n\n".join(text), _targets_b(rates) if section == "peers-b" else _targets_a(rates)


def _targets_b(rates):
    targets = []
    for placement, peer, wanted in TARGETS_B:
        pair = rates.get(ours(placement), []), rates.get(peer, [])
        by_round = [ratio(mine, theirs) for mine, theirs in zip(*pair)]
        targets.append(at_least(f"{placement} ≥ {wanted} × {PEER_NAMES[peer]}'s tokens/s (work b)", wanted,
                                ratio(median(pair[0]), median(pair[1])), by_round))
    return targets


def _targets_a(rates):
    """Every placement is faster than every peer that was run."""
    peers = {program: median(rates[program]) for program in rates if program in PEER_NAMES and median(rates[program])}
    fastest = max(peers, key=peers.get) if peers else None
    targets = []
    for placement in PLACEMENTS:
        mine = median(rates.get(ours(placement), []))
        beside = f"{number(mine)} tokens/s beside {number(peers.get(fastest))} of {PEER_NAMES[fastest]}" if peers else "–"
        targets.append(target(f"{placement} is faster than every peer (work a)", beside,
                              mine > peers[fastest] if mine and peers else None))
    return targets
