"""State shared by the threads of a simulated worker: flags, faults, and connections to others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from sim.meetings import Meetings
from sim.snapshot_server import SimSnapshotServer
from sim.storage import Storage
from sim.timeline import Block, Body, GroupBroken, Thread

from actors.simulation.timeline import Timeline
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Form
from elastic.protocol.events import Event
from elastic.protocol.step_records import NUM_KEPT_RECORDS, NUM_SENT_RECORDS
from elastic.replay.reattachment import NUM_KEPT_EVENTS, Outbox


class Interrupted(Exception):
    """The generation is being aborted: unwind."""


class Raised(Exception):
    """What a fault makes a worker raise; `kind` as in `WorkerRaised`."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"injected exception: {kind}")
        self.kind = kind


@dataclass
class Surroundings:
    """What all workers share."""

    timeline: Timeline
    random: Random
    meetings: Meetings
    storage: Storage
    job: Job
    eval_every: int
    collective_timeout_s: float
    report: Callable[[str, int, Event], None]
    at: Callable[[str, str], None]
    """Called at each moment that a worker passes, at which a fault may be due."""
    incarnation: int = 1
    """Of the controller that starts workers now."""
    store_port: int = 0
    newest_vote: tuple[int, int] = (0, 0)
    snapshot_every: int = 0
    audit_every: int = 0
    straggler_every: int = 0
    step_s: tuple[float, float] = (0.02, 0.05)
    unwind_s: tuple[float, float] = (0.001, 0.01)
    form_s: tuple[float, float] = (0.01, 0.03)
    snapshot_s: tuple[float, float] = (0.002, 0.03)
    """How long a copy to one snapshot server takes."""
    num_kept_events: int = NUM_KEPT_EVENTS
    num_kept_records: int = NUM_KEPT_RECORDS
    num_sent_records: int = NUM_SENT_RECORDS
    read: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """By generation and step: the ids of the samples that all ranks together read."""
    snapshot_servers: dict[str, SimSnapshotServer] = field(default_factory=dict)
    """By node."""

    def draw(self, low_s: float, high_s: float) -> float:
        return self.random.uniform(low_s, high_s)


class Control:
    """The flags that commands and faults set, and the actions that depend on them."""

    def __init__(self, name: str, around: Surroundings) -> None:
        self.name = name
        self.around = around
        self.outbox = Outbox(around.incarnation, around.num_kept_events)
        self.training: Thread
        self.frozen = False
        self.deaf = False
        self.disk_full = False
        self.write_hangs = False
        self.next_error = ""
        self.num_nans = 0
        self.next_loss = 1.0
        self.falsifies_checksum = False
        self.slowness = 1.0
        self.world_rank: int | None = None
        self.aborted_generation = 0
        self.running_generation = 0
        self.pause_requested_generation = 0
        self.save_request = (0, 0)
        """Generation of the save request, and the step after which it applies."""

    @property
    def is_pause_requested(self) -> bool:
        return self.pause_requested_generation >= self.running_generation

    def is_save_requested_by_vote(self, saved_step: int) -> bool:
        generation, after_step = self.save_request
        return generation >= self.running_generation and after_step >= saved_step

    def report(self, event: Event) -> None:
        self.outbox.add(event)
        self.around.report(self.name, self.outbox.incarnation, event)

    def repeat_reports(self, incarnation: int, committed_step: int) -> None:
        """Report again to a controller that knows the steps up to this one."""
        for event in self.outbox.events_to_repeat(incarnation, committed_step):
            self.around.report(self.name, incarnation, event)

    def check(self) -> None:
        """Raises `Interrupted` if the generation is being aborted."""
        if self.running_generation <= self.aborted_generation:
            raise Interrupted

    def at(self, moment: str) -> Body:
        """A moment at which a fault may strike this worker."""
        self.around.at(self.name, moment)
        if self.next_error and moment != "ready":
            kind, self.next_error = self.next_error, ""
            raise Raised(kind)
        if self.training.ended:
            yield Block("nothing")
        if self.frozen:
            yield 0.0

    def work(self, seconds: float) -> Body:
        """Compute for some seconds, checking now and then for an abort."""
        for _ in range(3):
            self.check()
            yield seconds / 3
        self.check()

    def meet(
        self,
        kind: str,
        order: Form,
        step: int = 0,
        brings: object = None,
        needs: frozenset[str] | None = None,
    ) -> Body:
        """A collective of the generation: only members vote and audit, all participants do the
        rest."""
        if order.generation <= self.aborted_generation and not self.deaf:
            raise GroupBroken("aborted before it began")
        everyone = (
            order.assignment.members if kind in ("vote", "audit") else order.plan.participants
        )
        key = (kind, order.generation, step)
        meetings = self.around.meetings
        meetings.come(key, self.name, self.training, frozenset(everyone), brings, needs)
        brought: dict[str, Any] = yield Block("peers", self.around.collective_timeout_s)
        return brought

    def interrupt_collective(self) -> None:
        """Make the training thread's current collective raise.

        A deaf worker misses the wake-up, as Gloo's do, and blocks until its timeout.
        """
        if self.training.waiting_on == "peers" and not self.deaf:
            delay_s = self.around.draw(0.001, 0.01)
            self.training.interrupt(GroupBroken("aborted"), delay_s)
