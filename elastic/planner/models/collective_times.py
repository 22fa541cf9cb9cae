"""Collective times: seconds of a collective in a group of a layout.

A measured machine has a table of seconds by bytes for small groups of one node. Between two sizes
the seconds are interpolated, and beyond them they go on as a line. Larger groups have more steps:
a latency grows with the logarithm of the ranks, and the bytes that each sends in a ring with
(n - 1) / n. Without a table, a collective takes the machine's latency, and its bytes over the
slowest bandwidth in the group. If workers outnumber the cores of a node, groups that communicate at
the same time wait for one another's processors.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2

from elastic.geometry.training_job import Bandwidths, Capacity, CollectiveTimes, Machine

SENT_SHARES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""The bytes that each of n workers sends in a ring, in units of (n - 1) / n of the tensor."""


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a job's workers: what is measured of them, and how many share a node."""

    machine: Machine
    bandwidths: Bandwidths
    node_size: int
    rack_size: int
    num_workers: int

    @classmethod
    def of(
        cls, machine: Machine, bandwidths: Bandwidths, capacity: Capacity, num_workers: int
    ) -> Links:
        return cls(machine, bandwidths, capacity.node_size, capacity.rack_size, num_workers)

    def contention(self, num_workers: int) -> float:
        """How much longer this many workers compute on a node than one for each core."""
        return contention(self.machine, self.node_size, num_workers)

    def seconds(
        self, kind: str, num_ranks: int, num_bytes: float, span: int, count: float = 1
    ) -> float:
        """The seconds of `count` collectives with `num_bytes` in all; `span` is the number of
        consecutive world ranks within which the group lies."""
        if num_ranks <= 1 or count <= 0:
            return 0.0
        sent = num_bytes * _sent_share(kind, num_ranks)
        if span <= self.node_size and self.machine.collectives:
            table = _table(self.machine.collectives, kind, num_ranks)
            if table is not None:
                crowd = self.contention(self.num_workers) / self.contention(num_ranks)
                return count * crowd * _interpolate(table.points, num_bytes / count)
        bandwidth = self._bandwidth(span)
        latency_s = self.machine.latency_s * count
        return latency_s + (sent / bandwidth if bandwidth else 0.0)

    def _bandwidth(self, span: int) -> float | None:
        if span <= self.node_size:
            return self.bandwidths.node
        return self.bandwidths.rack if span <= self.rack_size else self.bandwidths.far


def contention(machine: Machine, node_size: int, num_workers: int) -> float:
    """See `Links.contention`."""
    cores = machine.cores
    return max(1.0, min(num_workers, node_size) / cores) if cores else 1.0


def overlapped(compute_s: float, communication_s: float, interference: float) -> float:
    """The seconds of both if they run side by side."""
    shorter = min(compute_s, communication_s)
    return max(compute_s, communication_s) + interference * shorter


def _sent_share(kind: str, num_ranks: int) -> float:
    if kind not in SENT_SHARES:
        return 1.0
    return SENT_SHARES[kind] * (num_ranks - 1) / num_ranks


@lru_cache(maxsize=1024)
def _table(
    tables: tuple[CollectiveTimes, ...], kind: str, num_ranks: int
) -> CollectiveTimes | None:
    """The table of a group of this size, from that of the largest measured group within it."""
    known = [t for t in tables if t.kind == kind]
    if not known:
        return None
    within = [t for t in known if t.num_ranks <= num_ranks]
    table = max(within or known, key=lambda t: t.num_ranks)
    if table.num_ranks == num_ranks or kind == "shift":
        return table
    more_steps = log2(num_ranks) / log2(table.num_ranks)
    more_bytes = _sent_share(kind, num_ranks) / _sent_share(kind, table.num_ranks)
    latency_s = table.points[0][1]
    points = tuple(
        (size, latency_s * more_steps + (seconds - latency_s) * more_bytes)
        for size, seconds in table.points
    )
    return replace(table, num_ranks=num_ranks, points=points)


def _interpolate(points: tuple[tuple[float, float], ...], num_bytes: float) -> float:
    """Between points, and beyond the last as between the last two; never less than the first."""
    if num_bytes <= points[0][0] or len(points) == 1:
        return points[0][1]
    after = min(max(1, bisect_left(points, (num_bytes, 0.0))), len(points) - 1)
    (low, low_s), (high, high_s) = points[after - 1], points[after]
    return low_s + (num_bytes - low) * max(0.0, high_s - low_s) / (high - low)
