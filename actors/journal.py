"""The journal: replaying it brings the core back."""

from __future__ import annotations

from actors.lines import LineLog
from elastic.replaying import Replay


def replay(journal: LineLog) -> Replay:
    """What the journal leaves behind (invariant 10).

    Raises `UnreadableJournal` for a line of another format.
    """
    replay = Replay()
    for line in journal.lines():
        replay.take(line)
    return replay
