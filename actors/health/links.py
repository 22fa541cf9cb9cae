"""Comparison of a new worker's links with those between members, measured at the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from actors.health.link_server import ask_for_link, measure_link
from elastic.geometry.machine_report import Peer
from elastic.geometry.topology import Place

NUM_TRIES = 3
PAUSE_S = 0.5
"""Other new workers may be probing the same members."""
MAX_PEERS = 3


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
    for is_near in (True, False):
        own = [peer for peer in peers if _is_link(here, peer.place, is_near)][:MAX_PEERS]
        pairs = [(a, b) for a in own for b in peers if _is_link(a.place, b.place, is_near)]
        if pairs and (reason := _compare(own, pairs[:MAX_PEERS], secret, slow_factor, slowed_by)):
            return reason
    return ""


def _compare(
    own: Sequence[Peer],
    pairs: Sequence[tuple[Peer, Peer]],
    secret: bytes,
    slow_factor: float,
    slowed_by: float,
) -> str:
    """Measure until one own link is fast enough, at most `NUM_TRIES` times."""

    def delay(elapsed_s: float) -> None:
        time.sleep((slowed_by - 1.0) * elapsed_s)

    fastest = 0.0
    for attempt in range(NUM_TRIES):
        time.sleep(PAUSE_S if attempt else 0.0)
        measured = [measure_link((p.host, p.port), secret, delay) for p in own]
        others = [ask_for_link((a.host, a.port), (b.host, b.port), secret) for a, b in pairs]
        typical = min(filter(None, others), default=0.0)
        fastest = max(fastest, *measured)
        if fastest * slow_factor >= typical:
            return ""
    nodes = ", ".join(peer.node for peer in own)
    return (
        f"its links to {nodes} reach {fastest / 1e6:.0f} MB/s, those between members at least "
        f"{typical / 1e6:.0f} MB/s"
    )


def _is_link(here: Place, there: Place, is_near: bool) -> bool:
    """Whether two places are on different nodes, and in the same rack or not."""
    is_same_rack = bool(here.rack) and here.rack == there.rack
    return here.node != there.node and is_same_rack == is_near
