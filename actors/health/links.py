"""Comparison of a new worker's links with those between members, measured at the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from actors.health.link_server import ask_for_link, measure_link
from elastic.duties.bandwidth import link_class
from elastic.geometry.machine_report import Peer
from elastic.geometry.topology import Place

NUM_TRIES = 3
PAUSE_S = 0.5
"""Other new workers may be probing the same members."""
MAX_PEERS = 3
LIMIT_S = 30.0
"""Members may be gone by now: a worker that waited for a machine does not wait for them, too."""


def find_slow_links(
    here: Place,
    peers: Sequence[Peer],
    secret: bytes,
    slow_factor: float,
    slowed_by: float = 1.0,
) -> str:
    """Why this machine's links are too slow for training; empty if they are not.

    They are if the fastest of them is over `slow_factor` times slower than every measured link
    between members that are as near to each other: in the same rack, or in different ones.
    `slowed_by` is an injected fault.
    """
    until = time.monotonic() + LIMIT_S
    for distance in ("rack", "far"):
        equally_far = [peer for peer in peers if link_class(here, peer.place) == distance]
        if len(equally_far) < 2:
            continue
        probe = _LinkProbe(equally_far[:MAX_PEERS], distance, secret, slowed_by)
        for attempt in range(NUM_TRIES):
            time.sleep(PAUSE_S if attempt else 0.0)
            if not (reason := probe.compare(slow_factor, until)):
                break
        else:
            return reason
    return ""


class _LinkProbe:
    """Measures the links to some members, and between these."""

    def __init__(
        self, peers: Sequence[Peer], distance: str, secret: bytes, slowed_by: float
    ) -> None:
        self._peers = peers
        self._distance = distance
        self._secret = secret
        self._slowed_by = slowed_by
        self._fastest = 0.0

    def compare(self, slow_factor: float, until: float) -> str:
        """Measure all links once more; why they are too slow, or empty: also if it takes too
        long."""
        pairs = [
            (a, b)
            for number, a in enumerate(self._peers)
            for b in self._peers[number + 1 :]
            if link_class(a.place, b.place) == self._distance
        ]
        others: list[float] = []
        for peer in self._peers:
            if time.monotonic() > until:
                return ""
            speed = measure_link(peer.address, self._secret, self._delay)
            self._fastest = max(self._fastest, speed)
        for a, b in pairs:  # a dead member gives 0
            if time.monotonic() > until:
                return ""
            others.append(ask_for_link(a.address, b.address, self._secret))
        slowest = min(filter(None, others), default=0.0)
        if self._fastest * slow_factor >= slowest:
            return ""
        nodes = ", ".join(peer.node for peer in self._peers)
        return (
            f"its links to {nodes} reach {self._fastest / 1e6:.0f} MB/s, those between members at "
            f"least {slowest / 1e6:.0f} MB/s"
        )

    def _delay(self, elapsed_s: float) -> None:
        time.sleep((self._slowed_by - 1.0) * elapsed_s)
