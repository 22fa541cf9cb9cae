"""The journal: replaying it brings the core back."""

from __future__ import annotations

from actors.lines import LineLog
from elastic.core import Core
from elastic.state import CoreState
from elastic.wire import replayed


def replay(journal: LineLog) -> Core:
    """The core as the journal leaves it (invariant 10).

    Begins at the newest full state and takes the events after it; `time` is clamped so that it
    never goes back. Raises `UnreadableJournal` for a line of another format.
    """
    core, now = Core(), 0.0
    for line in journal.lines():
        told = replayed(line)
        now = max(now, line["time"])
        if isinstance(told, CoreState):
            core = Core(told)
        elif told is not None:
            core.step(now, told)
    return core
