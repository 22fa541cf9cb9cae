"""One watcher a node: a thread that asks those who would know of this machine's end.

Which cloud this is, if any, the machine's firmware says without any traffic. Where it does not say
so, each is tried. Whoever has not answered from the beginning on is soon not asked any more.
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
"""By a word of the firmware's."""


@dataclass
class _Asked:
    """A source, and how often it may stay silent before it is not asked any more."""

    source: NoticeSource
    num_tries: float


class NodeWatcher:
    """`notice` is what is announced at present, if anything; any thread may read it."""

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        guesses: Sequence[NoticeSource] = (),
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        """`guesses` are sources that are most probably not there."""
        self.notice: Notice | None = None
        self._asked = [_Asked(source, NUM_TRIES) for source in sources]
        self._asked += [_Asked(source, NUM_TRIES_OF_A_GUESS) for source in guesses]
        self._every_s = every_s
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="notices", daemon=True).start()

    @property
    def num_asked(self) -> int:
        """How many sources are still asked."""
        return len(self._asked)

    def close(self) -> None:
        self._closed.set()

    def _serve(self) -> None:
        while self._asked and not self._closed.is_set():
            notices = [notice for asked in self._asked if (notice := _look(asked))]
            self.notice = min(notices, key=_urgency, default=None)
            self._asked = [asked for asked in self._asked if asked.num_tries]
            self._closed.wait(self._every_s)


def watch_this_machine() -> NodeWatcher:
    """A watcher that asks whoever may know."""
    known = clouds_by_firmware()
    if known is None:
        return NodeWatcher([Pod()], [cloud() for cloud in CLOUDS.values()])
    return NodeWatcher([*known, Pod()])


def clouds_by_firmware(folder: Path = FIRMWARE) -> list[NoticeSource] | None:
    """The cloud that this machine is of, if any; None if its firmware says nothing."""
    told = " ".join(_field(folder / name) for name in FIELDS).strip()
    return [cloud() for word, cloud in CLOUDS.items() if word in told] if told else None


def _look(asked: _Asked) -> Notice | None:
    try:
        notice = asked.source.look()
    except (OSError, ValueError, LookupError, TypeError):
        # Nobody is there, or somebody else than was meant, or he is busy: that is no news.
        asked.num_tries -= 1
        return None
    asked.num_tries = inf  # he is there
    return notice


def _field(path: Path) -> str:
    try:
        return path.read_text().strip().lower()
    except OSError:
        return ""  # not every machine has it, and not everybody may read it


def _urgency(notice: Notice) -> float:
    return inf if notice.deadline is None else notice.deadline
