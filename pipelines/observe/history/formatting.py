"""Short formats for people: durations, quantities and counts."""

from __future__ import annotations

UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
"""A unit in seconds, its name, and the next smaller one."""


def duration(seconds: float) -> str:
    """`0.21 s`, `48 s`, `12 min 3 s`, `4 h 5 min`, `3 d 2 h`."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.01 else "0 s"
    for size, unit, step, part in UNITS:
        rounded = round(seconds / step) * step
        if rounded >= size:
            rest = rounded % size // step
            return f"{rounded // size} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{round(seconds)} s"


def quantity(value: float) -> str:
    """`950`, `35.1k`, `1.20M`."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:#.3g}".rstrip(".") + letter
    return f"{value:.3g}"


def counted(number: int, thing: str) -> str:
    """`1 worker`, `3 workers`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def by_number(worker: str) -> tuple[int, str]:
    """The sort key of workers' names: w2 comes before w10."""
    return len(worker), worker


def shortened(text: str, length: int) -> str:
    """One line of at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"
