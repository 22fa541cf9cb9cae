"""Kubernetes: a pod is told by a file that its preStop hook writes, ahead of SIGTERM.

SIGTERM itself goes to the first process of a container, which is Ray, and leaves half a minute. The
hook runs before that, and its time counts as part of the same grace period.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from actors.notices.notice import Notice

FILE = Path("/tmp/elastic-node-ends-at")
FORGOTTEN_S = 60.0
"""A file of a time that is over for so long is of a machine that lives on."""


class Pod:
    """The file has the time of the end, in seconds since the epoch."""

    def __init__(self, file: Path = FILE, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock

    def look(self) -> Notice | None:
        """See `Source`. A file of another user, who is not root either, does not count."""
        try:
            if self._file.stat().st_uid not in (0, os.getuid()):
                return None
            text = self._file.read_text()
        except FileNotFoundError:
            return None
        if not text.strip():
            return None  # it is just being written
        deadline = float(text)
        is_news = deadline > self._clock() - FORGOTTEN_S
        return Notice("the pod is terminated", deadline) if is_news else None
