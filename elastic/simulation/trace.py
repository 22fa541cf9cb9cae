"""Availability traces: when which node appears, announces its end, and disappears.

The format is recognised by the content:

| format | first line | time |
|---|---|---|
| CSV with a header | `time,node,event` and optionally `price` | seconds |
| Bamboo, Oobleck | `0,add,node1` | milliseconds |
| Parcae | `[0, "add", {"nodes": ["node-0"]}]` | milliseconds |
| SkyPilot | `{"metadata": {"gap_seconds": 600}, "data": [3, 2]}`: nodes in each gap | gaps |
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from typing import Any

from elastic.geometry.errors import ElasticError

ADD, REMOVE, NOTICE = "add", "remove", "notice"
KINDS = (ADD, REMOVE, NOTICE)
COLUMNS = ("time", "node", "event")
MS = 1e-3


class InvalidTrace(ElasticError):
    """A file that is no availability trace; the message names the line and says how to fix it."""


@dataclass(frozen=True, slots=True)
class NodeChange:
    """At `time_s` a node is added or removed, or announces (`notice`) that it ends at `until_s`.

    `price` is the price of a node-hour from an addition on (0: not known).
    """

    time_s: float
    node: str
    kind: str
    price: float = 0.0
    until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Availability:
    """The changes of a trace in the order of time, from 0 to `end_s`."""

    changes: tuple[NodeChange, ...]
    end_s: float

    @property
    def peak(self) -> int:
        """The most nodes that are available at once."""
        return max((number for _, number in self.counts()), default=0)

    @property
    def num_changes(self) -> int:
        """The number of times after the start at which nodes appear or disappear."""
        return len({c.time_s for c in self.changes if c.kind != NOTICE and c.time_s > 0})

    @property
    def num_removed(self) -> int:
        return sum(change.kind == REMOVE for change in self.changes)

    def counts(self) -> Iterator[tuple[float, int]]:
        """Each time at which the number of available nodes changes, with the new number."""
        number, counted = 0, [(c.time_s, c.kind) for c in self.changes if c.kind != NOTICE]
        for index, (time_s, kind) in enumerate(counted):
            number += 1 if kind == ADD else -1
            if index + 1 == len(counted) or counted[index + 1][0] > time_s:
                yield time_s, number

    def worker_s(self, per_node: int, most: int, until_s: float) -> float:
        """Worker-seconds up to `until_s` on nodes of `per_node` workers, at most `most` at once."""
        steps = [*self.counts(), (max(until_s, self.end_s), 0)]
        return sum(
            min(number * per_node, most) * max(0.0, min(end, until_s) - begin)
            for (begin, number), (end, _) in pairwise(steps)
        )

    def cost(self, until_s: float) -> float | None:
        """The price of all nodes up to `until_s`; None if the trace has no prices."""
        if not any(change.price for change in self.changes):
            return None
        since: dict[str, NodeChange] = {}
        total = 0.0
        for change in self.changes:
            if change.kind == ADD:
                since[change.node] = change
            elif change.kind == REMOVE:
                total += _price(since.pop(change.node), min(change.time_s, until_s))
        return total + sum(_price(added, until_s) for added in since.values())

    def with_notice(self, notice_s: float) -> Availability:
        """The same trace with a notice of `notice_s` seconds before each removal."""
        if not notice_s:
            return self
        there: dict[str, float] = {}
        notices = []
        for change in self.changes:
            if change.kind == ADD:
                there[change.node] = change.time_s
            elif change.kind == REMOVE:
                at = max(there[change.node], change.time_s - notice_s)
                notices.append(NodeChange(at, change.node, NOTICE, until_s=change.time_s))
        return Availability(_ordered((*self.changes, *notices)), self.end_s)


def parse_trace(text: str) -> Availability:
    """Read a trace of any known format. Raises `InvalidTrace`."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise InvalidTrace("it is empty: give lines of time,node,event")
    first = lines[0][1].lstrip()
    if first.startswith("{"):
        return _parse_counts(text)
    if first.startswith("["):
        changes = [change for number, line in lines for change in _parcae(number, line)]
        last_s = _parcae_end(lines[-1][1])
    elif first.partition(",")[0].strip().lower() == "time":
        changes, last_s = list(_table(lines)), 0.0
    else:
        changes, last_s = [_bamboo(number, line) for number, line in lines], 0.0
    return availability(changes, last_s)


def availability(changes: Iterable[NodeChange], end_s: float = 0.0) -> Availability:
    """Order and check changes. Raises `InvalidTrace` for a node that is added or removed twice."""
    ordered = tuple(_with_ends(_ordered(changes)))
    there: set[str] = set()
    for change in ordered:
        at = f"at {change.time_s:g} s: node {change.node}"
        if change.kind == ADD and change.node in there:
            raise InvalidTrace(f"{at} is added, but it is there: remove it before")
        if change.kind != ADD and change.node not in there:
            raise InvalidTrace(f"{at} has a {change.kind}, but it is not there: add it before")
        if change.kind == ADD:
            there.add(change.node)
        elif change.kind == REMOVE:
            there.remove(change.node)
    if not ordered:
        raise InvalidTrace("no node is ever added: give lines of time,node,event")
    last_s = max(end_s, ordered[-1].time_s)
    if last_s <= 0:
        raise InvalidTrace("all changes are at time 0: add the time of the last change")
    return Availability(ordered, last_s)


def _ordered(changes: Iterable[NodeChange]) -> tuple[NodeChange, ...]:
    """In the order of time; of one time removals first, so that a node may be replaced."""
    rank = {REMOVE: 0, ADD: 1, NOTICE: 2}
    return tuple(sorted(changes, key=lambda change: (change.time_s, rank[change.kind])))


def _price(added: NodeChange, until_s: float) -> float:
    return added.price * max(0.0, until_s - added.time_s) / 3600


def _with_ends(changes: Sequence[NodeChange]) -> Iterator[NodeChange]:
    """Give each notice the time of its node's next removal."""
    for index, change in enumerate(changes):
        if change.kind != NOTICE:
            yield change
            continue
        ends = [c.time_s for c in changes[index:] if (c.node, c.kind) == (change.node, REMOVE)]
        yield replace(change, until_s=ends[0] if ends else change.time_s)


def _table(lines: list[tuple[int, str]]) -> Iterator[NodeChange]:
    header = [name.strip().lower() for name in lines[0][1].split(",")]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise InvalidTrace(f"line 1 lacks the column {missing[0]}: begin with time,node,event")
    rows = csv.DictReader([line for _, line in lines[1:]], header)
    for (number, _), row in zip(lines[1:], rows, strict=True):
        kind, node = (row["event"] or "").strip(), (row["node"] or "").strip()
        time_s = _number(number, "time", row["time"])
        price = _number(number, "price", row["price"]) if row.get("price") else 0.0
        yield _checked(number, NodeChange(time_s, node, kind, price))


def _bamboo(number: int, line: str) -> NodeChange:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 3:
        raise InvalidTrace(
            f"line {number} has {len(parts)} fields: give time_ms,add,node, or begin with the "
            "header time,node,event"
        )
    time, kind, node = parts
    if kind not in (ADD, REMOVE):
        raise InvalidTrace(f"line {number}: event {kind!r} is not known: use add or remove")
    return _checked(number, NodeChange(MS * _number(number, "time", time), node, kind))


def _parcae(number: int, line: str) -> list[NodeChange]:
    try:
        time, kind, details = json.loads(line)
        nodes = [str(node) for node in details["nodes"]]
    except (ValueError, TypeError, KeyError):
        raise InvalidTrace(
            f'line {number} is not [time_ms, "add", {{"nodes": [...]}}]: use Parcae\'s format'
        ) from None
    time_s = MS * _number(number, "time", time)
    if kind == "no-op":
        return []
    return [_checked(number, NodeChange(time_s, node, kind)) for node in nodes]


def _parcae_end(line: str) -> float:
    """The end of the last interval, in seconds."""
    time, _, details = json.loads(line)
    return MS * (float(time) + float(details.get("duration", 0.0)))


def _parse_counts(text: str) -> Availability:
    """A list of node counts; the newest nodes disappear first."""
    try:
        whole = json.loads(text)
        gap_s, counts = float(whole["metadata"]["gap_seconds"]), [int(n) for n in whole["data"]]
    except (ValueError, TypeError, KeyError):
        raise InvalidTrace(
            'it is not {"metadata": {"gap_seconds": 600}, "data": [3, 2]}: use SkyPilot\'s format'
        ) from None
    changes: list[NodeChange] = []
    there: list[str] = []
    for index, number in enumerate(counts):
        while len(there) > max(0, number):
            changes.append(NodeChange(index * gap_s, there.pop(), REMOVE))
        while len(there) < number:
            there.append(f"node{len(changes)}")
            changes.append(NodeChange(index * gap_s, there[-1], ADD))
    return availability(changes, gap_s * len(counts))


def _checked(number: int, change: NodeChange) -> NodeChange:
    if change.kind not in KINDS:
        raise InvalidTrace(
            f"line {number}: event {change.kind!r} is not known: use {', '.join(KINDS)}"
        )
    if not change.node:
        raise InvalidTrace(f"line {number} names no node: give time,node,event")
    return change


def _number(number: int, name: str, value: Any) -> float:
    parse: Callable[[Any], float] = float
    try:
        parsed = parse(value)
    except (TypeError, ValueError):
        parsed = -1.0
    if not isfinite(parsed) or parsed < 0:
        raise InvalidTrace(f"line {number}: {name} {value!r} is no number of 0 or more")
    return parsed
