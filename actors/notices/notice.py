"""Termination notices, and queries to a cloud's metadata server."""

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
"""The address of the clouds' metadata servers; a number, since a name may not resolve."""
TIMEOUT_S = 1.0
NOT_FOUND = 404

_OPENER = build_opener(ProxyHandler({}))
"""It bypasses proxies: they cannot reach this machine's metadata server."""


@dataclass(frozen=True)
class Notice:
    """This machine will be gone at `deadline`, in seconds since the epoch; without a deadline it is
    at risk. The deadline is valid only for this machine's wall clock; see `TimedNotice`."""

    cause: str
    deadline: float | None = None


@dataclass(frozen=True)
class TimedNotice:
    """A notice that another machine can use, though its wall clock may differ by minutes: the
    machine will be gone `left_s` after this was made."""

    notice: Notice
    left_s: float | None


def with_time_left(
    notice: Notice | None, wall: Callable[[], float] = time.time
) -> TimedNotice | None:
    """A notice with the time that is left by this machine's `wall` clock."""
    if notice is None:
        return None
    return TimedNotice(notice, None if notice.deadline is None else notice.deadline - wall())


class NoticeSource(Protocol):
    """A source of termination notices."""

    def poll(self) -> Notice | None:
        """The current notice, or None. Raises OSError or ValueError if there is no answer, or one
        of an unknown form."""


def query_metadata(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """Return the metadata server's answer, or None if it has no such item. Raises OSError."""
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
        raise OSError(f"{url} does not speak HTTP: {error}") from None
    return body.decode()


def epoch_of(moment: datetime) -> float:
    """Seconds since the epoch; a time without a zone is in UTC, as clouds mean it."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
