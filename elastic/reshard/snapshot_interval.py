"""`snapshot.every=auto`: how many steps lie between two snapshots, from what one costs a step."""

from __future__ import annotations

from math import ceil, log2

AUTO_EVERY = -1
"""The number of steps that stands for `auto`."""
MAX_SHARE = 0.01
"""The share of the training time that snapshots may add with `auto`."""
MAX_EVERY = 1024
MARGIN = 1.5
"""The interval shrinks only if the cost may grow by this factor before it has to grow again."""


def interval_for(share: float, every: int) -> int:
    """The fewest steps between snapshots for which they add at most `MAX_SHARE`.

    `share` is the time that one snapshot adds to a step, relative to a step without; `every` is the
    interval now. Intervals are powers of two, at most `MAX_EVERY`: so workers that learn of another
    one at different steps still take the snapshots of the longer one together.
    """
    needed = _power_of_two(share / MAX_SHARE)
    return needed if needed >= every else min(every, _power_of_two(MARGIN * share / MAX_SHARE))


def _power_of_two(steps: float) -> int:
    return 1 << ceil(log2(min(max(steps, 1.0), float(MAX_EVERY))))
