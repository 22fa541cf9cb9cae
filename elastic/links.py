"""What the links between workers were measured to be, and what a microbatch was seen to take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic.costs import step_cost
from elastic.job import Capacity, Job, LinkSpeeds
from elastic.layout import Layout
from elastic.seating import Place, Topology
from elastic.wish import Wish


def median_speeds(links: Iterable[tuple[str, str, float]], topology: Topology) -> LinkSpeeds:
    """From (receiver, sender, bytes a second): the median of each class of node pair."""
    by_class: dict[str, list[float]] = {}
    for receiver, sender, speed in links:
        here, there = topology.get(receiver, Place()), topology.get(sender, Place())
        by_class.setdefault(_class(here, there), []).append(speed)
    return LinkSpeeds(**{name: sorted(found)[len(found) // 2] for name, found in by_class.items()})


def informed(job: Job, layout: Layout | None, median_step_s: float) -> Job:
    """The job with the time that a microbatch takes, by the steps seen under a layout."""
    if layout is None or not median_step_s or job.links == LinkSpeeds():
        return job
    axes = Wish(layout.pp, layout.cp, layout.tp, layout.ep, layout.zero, layout.vp)
    without_links = replace(job, links=LinkSpeeds())
    cost = step_cost(axes, without_links, Capacity(layout.num_workers))(layout.dp, layout.fsdp)
    return replace(job, microbatch_s=median_step_s / cost)


def _class(here: Place, there: Place) -> str:
    if here.node and here.node == there.node:
        return "node"
    return "rack" if here.rack and here.rack == there.rack else "far"
