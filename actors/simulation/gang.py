"""The members of a generation as one: they form, move state, and commit steps together.

A step commits for all members at once or for none, so no member is ever ahead of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from actors.simulation.cluster import LATENCY_S, SimulatedCluster, WorkerProcess
from actors.simulation.ledger import Ledger
from actors.simulation.snapshot_record import SnapshotRecord
from actors.simulation.timeline import Timeline
from actors.simulation.writes import CheckpointWrites
from elastic.geometry.tensor_specs import TensorSpec
from elastic.geometry.training_job import Job
from elastic.protocol.commands import (
    Abort,
    Form,
    Order,
    Pause,
    RequestCheckpoint,
    Reshard,
    Resume,
    SaveCheckpoint,
    StartSnapshots,
)
from elastic.protocol.events import (
    Event,
    GroupFormed,
    Paused,
    Progressed,
    Quiesced,
    StateReady,
    StepCommitted,
)
from elastic.protocol.votes import StepRecord, Vote
from elastic.simulation.costs import Costs
from elastic.simulation.movement import movement_of
from elastic.simulation.step_times import LayoutTimes

NOTHING_HELD = -1
PROGRESS_EVERY_S = 30.0
"""Shorter than any timeout of a hang."""


class Gang:
    """Carries out the orders of the controller; what it does next ends with each new order."""

    def __init__(
        self,
        timeline: Timeline,
        costs: Costs,
        job: Job,
        specs: tuple[TensorSpec, ...],
        step_times: LayoutTimes,
        cluster: SimulatedCluster,
        post: Callable[[Event], None],
    ) -> None:
        self.ledger = Ledger()
        self.snapshots = SnapshotRecord()
        self._timeline, self._costs, self._job, self._specs = timeline, costs, job, specs
        self._step_times = step_times
        self._cluster, self._post = cluster, post
        self._writes = CheckpointWrites(timeline, costs, job, cluster, post)
        self._form: Form
        self._members: tuple[str, ...] = ()
        self._busy: frozenset[str] = frozenset()
        """The workers that what is under way needs."""
        self._turn = 0
        """Counts what the gang begins; what ends with another number does not count."""
        self._step = 0
        self._vote: Vote | None = None
        self._wants_pause = False
        self._guarded_step = 0
        self._is_first = False

    def obey(self, order: Order) -> None:
        """Begin to carry out an order."""
        match order:
            case Form():
                self._begin_form(order)
            case Reshard():
                self._begin_reshard(order)
            case Resume():
                self._resume(order)
            case Pause():
                self._wants_pause = True
            case RequestCheckpoint():
                self._writes.request(order)
            case SaveCheckpoint():
                self._writes.begin(order.workers, order.step, order.generation)
            case StartSnapshots():
                self.snapshots.order = order
            case Abort():
                self._abort(order)
            case _:
                raise RuntimeError(f"no simulated worker is behind: {type(order).__name__}")

    def lose(self, worker: WorkerProcess) -> None:
        """A worker's process is gone: whatever needs it does not end."""
        if worker.name in self._busy:
            self._stop()

    def _stop(self) -> None:
        self._turn += 1
        self._busy = frozenset()
        self.snapshots.end(self._timeline.now)

    def _begin(self, workers: Sequence[str], seconds: float, end: Callable[[], None]) -> None:
        """Do something that needs all these workers, and then `end`."""
        self._turn += 1
        turn, self._busy = self._turn, frozenset(workers)
        if self._busy <= self._cluster.workers.keys():
            self._timeline.after(seconds, lambda: end() if turn == self._turn else None)

    def _begin_form(self, order: Form) -> None:
        self._stop()
        self._form, holders = order, frozenset(order.plan.holders)
        participants = order.plan.participants
        for worker in self._cluster.alive(participants):
            if worker.name not in holders:
                worker.step = None
        formed = [GroupFormed(name, order.generation) for name in participants]
        self._begin(participants, self._costs.form_s, partial(self._report, formed))

    def _report(self, events: Sequence[Event]) -> None:
        for event in events:
            self._post(event)

    def _begin_reshard(self, order: Reshard) -> None:
        plan, costs = self._form.plan, self._costs
        movement = movement_of(plan, self._specs)
        if order.source in ("live", "snapshot"):
            seconds = movement.busiest / costs.bytes_per_s
        elif order.source == "checkpoint":
            seconds = max(movement.needed) / costs.storage_bytes_per_s
        else:
            seconds = 0.0
        ready = [
            StateReady(name, order.generation, received, needed, seconds, 1, 1, 2)
            for name, received, needed in zip(
                plan.participants, movement.received, movement.needed, strict=True
            )
        ]

        def end() -> None:
            for worker in self._cluster.alive(plan.new.members):
                worker.step = plan.step
            self._report(ready)

        self._begin(plan.participants, LATENCY_S + seconds, end)

    def _resume(self, order: Resume) -> None:
        for worker in self._cluster.alive(order.released):
            worker.step = None
        self._members, self._step = order.workers, order.step
        self._guarded_step, self._wants_pause, self._vote = order.guarded_step, False, None
        self._writes.begin_generation(order.generation)
        self.snapshots.begin_generation(order.generation)
        self._is_first = True
        self._begin_step()

    def _begin_step(self) -> None:
        if self._step >= self._job.steps:
            self._end_at_boundary()
            return
        if self._guarded_step == self._step + 1:
            self._guarded_step = 0
            seconds = self._writes.begin(self._members, self._step, self._form.generation)
            self._begin(self._members, seconds + LATENCY_S, self._begin_step)
            return
        costs, layout = self._costs, self._form.assignment.layout
        step_s = self._step_times.of(layout)
        step_s += costs.first_step_s * self._is_first + costs.snapshot_s * self.snapshots.is_busy
        step_s += costs.save_s * self._writes.is_new
        self._is_first = self._writes.is_new = False
        self._compute(step_s, step_s)

    def _compute(self, rest_s: float, step_s: float) -> None:
        """Compute the rest of a step; a long one reports progress, as its probes would."""
        if rest_s <= PROGRESS_EVERY_S:
            self._begin(self._members, rest_s, partial(self._end_step, step_s))
            return

        def report() -> None:
            self._post(Progressed(self._form.generation))
            self._compute(rest_s - PROGRESS_EVERY_S, step_s)

        self._begin(self._members, PROGRESS_EVERY_S, report)

    def _end_step(self, step_s: float) -> None:
        self._step += 1
        now, number, generation = self._timeline.now, len(self._members), self._form.generation
        vote = self._vote = Vote(
            self._step,
            0.0,
            1,
            0.0,
            number,
            num_pause_requests=number * self._wants_pause,
            num_snapshots=number * self.snapshots.is_busy,
            num_save_requests=number * self._writes.is_requested,
            num_writing=number * self._writes.is_busy,
        )
        record = StepRecord(
            now, self._step, generation, number, None, None, None, None, step_s, False
        )
        for worker in self._cluster.alive(self._members):
            worker.step = self._step
        self.ledger.commit(self._step, now, step_s, number)
        self._post(StepCommitted(generation, record, vote))
        self.snapshots.note_step(self._step, now)
        if vote.saves(self._job.checkpoint_every):
            self._writes.begin(self._members, self._step, generation)
        if self._wants_pause or self._step >= self._job.steps:
            self._end_at_boundary()
        else:
            self._begin_step()

    def _end_at_boundary(self) -> None:
        generation, members = self._form.generation, self._members
        self._stop()
        self._report([Paused(name, generation, self._step) for name in members])

    def _abort(self, order: Abort) -> None:
        self._stop()
        vote = self._vote

        def end() -> None:
            for worker in self._cluster.alive(order.workers):
                step = NOTHING_HELD if worker.step is None else worker.step
                is_current = vote is not None and vote.step == step
                seen = vote if is_current else None
                saving_step = self._writes.begun_step
                self._post(
                    Quiesced(worker.name, order.generation, step, seen, saving_step=saving_step)
                )

        self._timeline.after(self._costs.unwind_s, end)
