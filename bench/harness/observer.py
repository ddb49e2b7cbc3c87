"""What observing parameter access costs where operators are short."""
from harness.runner import parsed
from harness.table import at_most, median, number, spread, table

TITLE = "What observing costs"
KINDS = {"plain": "plain", "observed": "observed; nothing is done with what is seen", "sharded": "sharded: zero3 on one rank"}


def measure(runner, plan):
    runner.begin("observer", plan.observer_repeats)
    repeats = []
    for repeat in range(plan.observer_repeats):
        name = f"{repeat + 1}-observer"
        run = runner.attempt(name, lambda: _one(runner, plan, name))
        if run:
            repeats.append(run)
    return {"steps": plan.observer_steps, "repeats": repeats}


def _one(runner, plan, name):
    words, others = runner.execute(name, [runner.build / "bench" / "observer_bench", "--steps", plan.observer_steps])
    raw = parsed(words)
    runner.keep(name, dict(raw, others_percent=others))
    runner.others.append(others)
    return raw


def report(numbers):
    """Markdown and targets."""
    values = lambda kind, what: [repeat[kind][what] for repeat in numbers["repeats"]]  # noqa: E731
    rows = [(name, number(median(values(kind, "step_ms")), 3), number(median(values(kind, "longer_percent")), 2),
             spread(values(kind, "longer_percent"), 2), number(median(values(kind, "operators_observed"))))
            for kind, name in KINDS.items()]
    text = [f"Six blocks of width 64, 4 × 64 tokens, one rank, one thread; medians of {numbers['steps']} steps of each kind, which take "
            "turns step by step, and of how much longer each takes than the plain step beside it. All have the same allocator and "
            "AdamW kernel. The third has the engine, too: gathers, releases, the hand-over of gradients, the agreement on each step.",
            table(("", "ms a step", "longer, %", "repeats", "operators observed a step"), rows)]
    if any(len({repeat[kind]["last_loss"] for kind in KINDS}) > 1 for repeat in numbers["repeats"]):
        text.append("**The losses of the three kinds differ**: this compares different work.")
    return "\n\n".join(text), [
        at_most("observer's cost at width 64 ≤ 1 % of a step", 1.0, median(values("observed", "longer_percent")),
                values("observed", "longer_percent"), 2),
        at_most("… and with the whole engine on one rank ≤ 1 %", 1.0, median(values("sharded", "longer_percent")),
                values("sharded", "longer_percent"), 2)]
