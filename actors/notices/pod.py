"""Kubernetes notices: a file that a pod's preStop hook writes before SIGTERM.

SIGTERM goes to the first process of the container, which is Ray, and leaves half a minute. The hook
runs before that, and its time counts as part of the same grace period.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from actors.notices.notice import Notice

FILE = Path("/tmp/elastic-node-ends-at")
FORGOTTEN_S = 60.0
"""A file whose time passed this long ago is stale: the machine lives on."""


class Pod:
    """Reads the time of the end from the file, in seconds since the epoch."""

    def __init__(self, file: Path = FILE, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock

    def poll(self) -> Notice | None:
        """See `NoticeSource`. A file counts only if it belongs to this user or to root."""
        try:
            if self._file.stat().st_uid not in (0, os.getuid()):
                return None
            text = self._file.read_text()
        except FileNotFoundError:
            return None
        if not text.strip():
            return None  # the hook is writing it now
        deadline = float(text)
        is_news = deadline > self._clock() - FORGOTTEN_S
        return Notice("the pod is terminated", deadline) if is_news else None
