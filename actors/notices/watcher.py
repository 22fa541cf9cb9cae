"""Watcher of a node: a thread that queries the sources of termination notices.

The machine's firmware says without any traffic which cloud this is, if any. If it does not say, the
watcher tries each cloud. It soon stops querying a source that has never answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from actors.notices.aws import Aws
from actors.notices.azure import Azure
from actors.notices.gcp import Gcp
from actors.notices.notice import Notice, NoticeSource
from actors.notices.pod import Pod

LOOK_EVERY_S = 2.0
NUM_TRIES = 90
"""Azure's first answer may take two minutes."""
NUM_TRIES_OF_A_GUESS = 3
FIRMWARE = Path("/sys/class/dmi/id")
FIELDS = ("sys_vendor", "product_name", "bios_version", "chassis_asset_tag")
CLOUDS: dict[str, Callable[[], NoticeSource]] = {
    "amazon": Aws,
    "google": Gcp,
    "7783-7084-3265-9085-8269-3286-77": Azure,  # the asset tag; the vendor has other machines, too
}
"""The source of each cloud, by a word in the firmware's fields."""


@dataclass
class _Queried:
    """A source, and how many queries may fail before the watcher gives it up."""

    source: NoticeSource
    num_tries: float


class NodeWatcher:
    """`notice` is the most urgent current notice, or None; any thread may read it."""

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        guesses: Sequence[NoticeSource] = (),
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        """`guesses` are sources that most probably do not exist here."""
        self.notice: Notice | None = None
        self._queried = [_Queried(source, NUM_TRIES) for source in sources]
        self._queried += [_Queried(source, NUM_TRIES_OF_A_GUESS) for source in guesses]
        self._every_s = every_s
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="notices", daemon=True).start()

    @property
    def num_queried(self) -> int:
        """The number of sources that the watcher still queries."""
        return len(self._queried)

    def close(self) -> None:
        self._closed.set()

    def _serve(self) -> None:
        while self._queried and not self._closed.is_set():
            notices = [notice for queried in self._queried if (notice := _look(queried))]
            self.notice = min(notices, key=_urgency, default=None)
            self._queried = [queried for queried in self._queried if queried.num_tries]
            self._closed.wait(self._every_s)


def watch_this_machine() -> NodeWatcher:
    """Start a watcher with the sources that this machine may have."""
    known = clouds_by_firmware()
    if known is None:
        return NodeWatcher([Pod()], [cloud() for cloud in CLOUDS.values()])
    return NodeWatcher([*known, Pod()])


def clouds_by_firmware(folder: Path = FIRMWARE) -> list[NoticeSource] | None:
    """The source of this machine's cloud, if it is in one; None if the firmware says nothing."""
    text = " ".join(_field(folder / name) for name in FIELDS).strip()
    return [cloud() for word, cloud in CLOUDS.items() if word in text] if text else None


def _look(queried: _Queried) -> Notice | None:
    try:
        notice = queried.source.poll()
    except (OSError, ValueError, LookupError, TypeError):
        # There is no server, or another kind of server, or it is busy: none of this is a notice.
        queried.num_tries -= 1
        return None
    queried.num_tries = inf  # the source exists
    return notice


def _field(path: Path) -> str:
    try:
        return path.read_text().strip().lower()
    except OSError:
        return ""  # not every machine has the file, and not every user may read it


def _urgency(notice: Notice) -> float:
    return inf if notice.deadline is None else notice.deadline
