"""Pieces of Markdown, and the numbers that go into them."""
import statistics


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def median(values):
    """Of those that there are; None of none."""
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def number(value, digits=0):
    return "–" if value is None else f"{value:,.{digits}f}"


def spread(values, digits=0):
    """The smallest and the largest, if there are several."""
    values = [value for value in values if value is not None]
    return f"{number(min(values), digits)}–{number(max(values), digits)}" if len(values) > 1 else ""


def ratio(above, below):
    return above / below if above and below else None


def target(want, got, met):
    """A line of the table of targets. `met` is None where something was not measured."""
    return {"want": want, "got": got, "met": {True: "met", False: "**not met**", None: "not measured"}[met]}


def at_least(want, wanted, got, values=(), digits=2):
    """`values` are those that `got` is the median of."""
    return target(want, with_spread(got, values, digits), None if got is None else got >= wanted)


def at_most(want, wanted, got, values=(), digits=3):
    return target(want, with_spread(got, values, digits), None if got is None else got <= wanted)


def with_spread(middle, values, digits):
    """The median and, of several values, the smallest and the largest."""
    around = spread(values, digits)
    return number(middle, digits) + (f" ({around})" if around else "")
