"""A notice, and how a machine's metadata server is asked for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Protocol
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

LINK_LOCAL = "http://169.254.169.254"
"""Where clouds have their metadata servers; by number, since a name may not resolve."""
TIMEOUT_S = 1.0
NOT_FOUND = 404

_OPENER = build_opener(ProxyHandler({}))
"""Whatever proxy is set for the internet knows nothing of this machine."""


@dataclass(frozen=True)
class Notice:
    """This machine will be gone at `deadline`, in seconds since the epoch; without one it may be
    taken before long. The deadline is for this machine's wall clock only; see `SeenNotice`."""

    cause: str
    deadline: float | None = None


@dataclass(frozen=True)
class SeenNotice:
    """A notice as another machine can use it, whose wall clock may be minutes away: the machine
    will be gone `left_s` after this was made."""

    notice: Notice
    left_s: float | None


def see(notice: Notice | None, wall: Callable[[], float] = time.time) -> SeenNotice | None:
    """What is announced, with the time that is left by this machine's `wall` clock."""
    if notice is None:
        return None
    return SeenNotice(notice, None if notice.deadline is None else notice.deadline - wall())


class NoticeSource(Protocol):
    """One way in which a machine is told of its end."""

    def look(self) -> Notice | None:
        """What is announced now, if anything. Raises OSError or ValueError if there is no answer,
        or none of the kind that is meant to come."""


def ask(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """What the metadata server answers; None if it has no such thing. Raises OSError."""
    request = Request(url, headers=dict(headers), method=method)
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read()
    except HTTPError as error:
        with error:
            if error.code == NOT_FOUND:
                return None
            raise
    except HTTPException as error:
        raise OSError(f"{url} is no web server: {error}") from None
    return body.decode()


def epoch_of(moment: datetime) -> float:
    """Clouds tell times in UTC, with or without saying so."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
