"""The Markdown report, from the numbers of the latest run of each section."""
import json

from harness import floor, kernels, memory, observer, peers, units
from harness.table import table

# In the order of the report: how each section is measured, reported and headed.
SECTIONS = {
    "floor": (floor.measure, floor.report, floor.TITLE),
    "peers-b": (lambda runner, plan: peers.measure(runner, plan, "peers-b"), lambda n: peers.report(n, "peers-b"), peers.TITLES["peers-b"]),
    "peers-a": (lambda runner, plan: peers.measure(runner, plan, "peers-a"), lambda n: peers.report(n, "peers-a"), peers.TITLES["peers-a"]),
    "units": (units.measure, units.report, units.TITLE),
    "memory": (memory.measure, memory.report, memory.TITLE),
    "observer": (observer.measure, observer.report, observer.TITLE),
    "kernels": (kernels.measure, kernels.report, kernels.TITLE),
}
BEGIN, END = "<!-- bench/run writes from here -->", "<!-- to here -->"
HEADER = f"""# Measurements
What `make bench` found (`bench/run --help` has more: `--quick`, `--only`). Nothing here is a test: numbers depend on the machine and on
what else it does. Spreads are the smallest and the largest of the repeats. Raw results of the latest run are in `build/bench/`.

{BEGIN}
{END}
"""


def render(results):
    """`results` are those of `bench/run`, by section."""
    targets, parts = [], []
    for section, (_, report, title) in SECTIONS.items():
        if section not in results:
            continue
        result = results[section]
        text, met = report(result["numbers"])
        targets += met
        remarks = [f"Measured on {result['date']}", f"{result['plan']} run of {result['minutes']:.1f} minutes"]
        if result["commit"]:
            remarks.append(f"sources at {result['commit']}")
        if result["noise"]:
            remarks.append(result["noise"])
        parts.append(f"## {title}\n{text}\n\n*{'; '.join(remarks)}.*")
    machine = [(name, value) for name, value in results["machine"].items()]
    head = f"## Machine\n{table(('', ''), machine)}"
    if targets:
        rows = [(each["want"], each["got"], each["met"]) for each in targets]
        head += "\n\n## Targets\n" + table(("target", "measured", ""), rows)
    return "\n\n".join([head, *parts])


def write(path, markdown):
    """Puts the report between the markers of the file, whose other text stays."""
    text = path.read_text() if path.exists() else HEADER
    if BEGIN not in text or END not in text:
        text = HEADER
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n{markdown}\n{END}{after}")


def load(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
