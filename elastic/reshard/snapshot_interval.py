"""How many steps lie between two snapshots, from what one costs a step and how long it takes.

The setting is a number of steps, which is kept as long as a snapshot is complete before the next
one is due, or `auto`.
"""

from __future__ import annotations

from math import ceil, log2

AUTO_EVERY = -1
"""The number of steps that stands for `auto`."""
MAX_SHARE = 0.01
"""The share of the training time that snapshots may add with `auto`."""
MAX_EVERY = 1024
MARGIN = 1.5
"""The interval shrinks only if the cost may grow by this factor before it has to grow again."""
HEADROOM = 1.25
"""A snapshot may take this many times longer than measured without being late for the next one."""


def interval_for(
    share: float, every: int, num_steps: float = 0.0, setting: int = AUTO_EVERY
) -> int:
    """The fewest steps between snapshots for which each is complete before the next one is due and,
    with `auto`, they add at most `MAX_SHARE`.

    `share` is the time that one snapshot adds to a step, relative to a step without. It takes
    `num_steps` steps until it is complete; 0 if the next vote can wait for it. `every` is the
    interval now, `setting` that of the user. Intervals are the setting (1 with `auto`) times powers
    of two, at most `MAX_EVERY`: so workers that learn of another one at different steps still take
    the snapshots of the longer one together.
    """
    least = 1 if setting == AUTO_EVERY else setting
    needed = max(share / MAX_SHARE if setting == AUTO_EVERY else 0.0, HEADROOM * num_steps) / least
    longer = least * _power_of_two(needed)
    return longer if longer >= every else min(every, least * _power_of_two(MARGIN * needed))


def _power_of_two(steps: float) -> int:
    return 1 << ceil(log2(min(max(steps, 1.0), float(MAX_EVERY))))
