"""Checks of the invariants after every event; their numbers are those of DESIGN.md, section 11."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import count
from random import Random

from sim.lineage import SPECS, Part, places, regions_under
from sim.shell import Records
from sim.storage import Storage

from elastic.controller.core import Core
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import AXES
from elastic.geometry.regions import Region
from elastic.geometry.target_layout import TargetLayout
from elastic.planner.proposal import assign
from elastic.protocol.commands import (
    Command,
    DropCheckpoints,
    Form,
    Pause,
    QuerySnapshotServers,
    RecordStep,
    Resume,
)
from elastic.protocol.commands import Stopped as RunStopped
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import (
    Audited,
    ComputeTimed,
    Evaluated,
    Event,
    GroupFormed,
    LayoutRequested,
    Paused,
    Progressed,
    Quiesced,
    RolledForward,
    RunOpened,
    StateReady,
    StepCommitted,
    WorkerRaised,
)
from elastic.protocol.notes import LayoutAnswered, RolledBack
from elastic.protocol.phases import Aborting, Ended, Forming, Pausing, Resharding, Running, Waiting
from elastic.protocol.snapshot_events import (
    SnapshotServerLost,
    SnapshotServerReported,
    SnapshotTimed,
)
from elastic.protocol.step_records import RecordsSent
from elastic.reshard.snapshot_placement import ParitySlot

GENERATION_BOUND = (
    GroupFormed
    | StateReady
    | StepCommitted
    | ComputeTimed
    | SnapshotTimed
    | Evaluated
    | Audited
    | Paused
    | Quiesced
    | RolledForward
    | RecordsSent
    | WorkerRaised
    | SnapshotServerReported
)


Parts = Callable[[set[str]], Iterable[tuple[str, Part]]]
Snapshots = Callable[[SnapshotServerReported], Iterable[Part]]


class Checks:
    """Watches one run, over all its controllers."""

    def __init__(self, random: Random, bound_s: float, parts: Parts, snapshots: Snapshots) -> None:
        """`parts` returns the parts that the named live workers really hold; `snapshots` returns
        the parts behind a snapshot server's report."""
        self._random = random
        self._bound_s = bound_s
        self._parts = parts
        self._snapshots = snapshots
        self._kept: dict[str, list[Part]] = {}
        self._parities: dict[str, tuple[ParitySlot, ...]] = {}
        self._generation_of: dict[int, int] = {}
        self._well_at = 0.0
        self._generation = 0
        self._recorded_step = 0
        self._formed: set[tuple[str, int]] = set()
        self._ready: set[tuple[str, int]] = set()
        self._form: Form | None = None
        self._members: tuple[str, ...] = ()
        self._has_rolled_back = False
        self._target_layout = TargetLayout()
        self._old_reports: list[Event] = []
        self._drawn_ahead: deque[float] = deque()

    def draw_ahead(self) -> None:
        """Draw now for a later event: the order of draws is older than that of a take-over, and
        kept seeds depend on it."""
        self._drawn_ahead.append(self._random.random())

    def note_fault(self, now: float) -> None:
        self._well_at = max(self._well_at, now)

    def note_restart(self, committed_step: int, generation: int) -> None:
        """The journal knows the steps up to this one; later ones are reported again, or lost. It
        knows each `Form` that left; one that did not may come again."""
        self._recorded_step = committed_step
        self._generation = min(self._generation, generation)

    def after(self, now: float, event: Event, commands: list[Command], core: Core) -> None:
        """Check the outcome of one event."""
        state = core.state
        if isinstance(event, GroupFormed):
            self._formed.add((event.worker, event.generation))
        if isinstance(event, StateReady):
            self._ready.add((event.worker, event.generation))
        if isinstance(event, RunOpened):
            self._kept.clear()  # the snapshot servers have ended with the job
        if isinstance(event, SnapshotServerReported) and event.generation == state.generation:
            self._kept[event.node] = list(self._snapshots(event))
            self._parities[event.node] = event.parities
        if isinstance(event, SnapshotServerLost):
            self._kept.pop(event.node, None)
            self._parities.pop(event.node, None)
        for command in commands:
            match command:
                case Form():
                    self._check_form(command, state)
                case Resume():
                    self._check_resume(command)
                    self._kept.clear()  # training changes it
                case RecordStep():
                    self._check_record(command)
                case RolledBack():
                    self._check_roll_back(command, state)
                case DropCheckpoints():
                    kept = {(saved.step, saved.generation) for saved in state.checkpoints.saved}
                    assert kept.isdisjoint(command.dropped), "a checkpoint in use is dropped"
                case QuerySnapshotServers():
                    self._kept.clear()
        if isinstance(event, LayoutRequested):
            self._check_answer(event, commands, state)
        self._check_roster(state)
        self._check_progress(now, state)
        self._check_stale(now, event, core)
        self._target_layout = state.layouts.target

    def after_end(
        self,
        outcome: RunStopped,
        state: ControllerState,
        records: Records,
        storage: Storage,
        read: dict[tuple[int, int], list[int]],
    ) -> None:
        """Check the end of the run: the saved lineage has each of the steps 1..n once, and its
        steps read all data from the beginning, except for skipped batches."""
        valid = [
            saved
            for saved in storage.whole()
            if state.checkpoints.counts(saved.step, saved.generation)
        ]
        newest, num_steps = next(reversed(valid), None), state.job.steps
        if newest is None or newest.step < outcome.step:
            assert outcome.outcome != "completed", "invariant 11: completed, but not saved"
            return
        assert outcome.outcome != "completed" or newest.step == num_steps
        metrics = records.metrics
        lines = [(line.generation, line.step) for line in metrics]
        assert len(set(lines)) == len(lines), "invariant 8: a line is doubled"
        last = {line.step: line.generation for line in metrics}
        saved = storage.visible[newest.path].lineage.generations
        recorded = tuple(last[step + 1] for step in range(newest.step))
        assert recorded == saved, f"invariant 8: metrics say {recorded}, the state {saved}"
        batches = [read[generation, step] for step, generation in enumerate(recorded, start=1)]
        rest = (number for number in count() if number not in state.rollbacks.skipped_batches)
        for batch, number in zip(batches, rest, strict=False):
            first = number * len(batch)
            assert batch == list(range(first, first + len(batch))), "invariant 5: other samples"

    def _check_form(self, form: Form, state: ControllerState) -> None:
        assert form.generation > self._generation, "invariant 6: a generation number is reused"
        self._generation = form.generation
        former, self._form = self._form, form
        check_mesh(form.assignment)
        # The rules after the event may drain a standby worker of this assignment.
        draining = state.membership.draining - set(form.assignment.standbys)
        available = sorted(state.membership.warm - draining)
        self._check_nodes(form, former, state)
        assert set(form.assignment.members) <= set(available), "a rank for a missing worker"
        memories = [
            m for w in available if (m := state.membership.records[w].memory_bytes) is not None
        ]
        standbys = set(form.assignment.standbys)
        assert standbys == set(available) - set(form.assignment.members), "a worker is forgotten"
        deferred = standbys & state.forming.deferred.keys()
        reassigned = []
        for workers in (available, [w for w in available if w not in deferred]):
            shuffled = self._random.sample(workers, len(workers))
            assigned = assign(
                form.plan.old,
                shuffled,
                generation=form.generation,
                target_layout=state.layouts.target,
                topology={w: state.membership.records[w].place for w in shuffled},
                job=state.job,
                memory_bytes=min(memories, default=None),
            )
            reassigned.append(assigned)
        members = [(a.layout, a.members) for a in reassigned if isinstance(a, Assignment)]
        expected = (form.assignment.layout, form.assignment.members)
        assert expected in members, "invariant 2: arrival order matters"
        check_shares(form, state.job.num_microbatches)

    def _check_nodes(self, form: Form, former: Form | None, state: ControllerState) -> None:
        """No worker gets a rank on a quarantined node while there are enough others. A worker of an
        aborted forming may hold a part of the state, and stays."""
        before = set(former.assignment.members if former else ())
        before |= {*(form.plan.old.members if form.plan.old else ()), *self._members}
        quarantined = {
            w
            for w in state.membership.warm
            if state.membership.records[w].node in state.quarantine.until
        } - before
        num_others = len(state.membership.warm - state.membership.draining - quarantined)
        if num_others >= state.policy.min_workers:
            assert quarantined.isdisjoint(form.assignment.members), "a rank on a quarantined node"

    def _check_resume(self, resume: Resume) -> None:
        self._members = resume.workers
        assert self._form, "invariant 7: resumed without a Form"
        assert resume.generation == self._form.generation, "invariant 6: resumed an older one"
        everyone = {(worker, resume.generation) for worker in self._form.plan.participants}
        assert everyone <= self._formed, "invariant 7: resumed before all groups were formed"
        assert everyone <= self._ready, "invariant 7: resumed before all state was there"

    def _check_answer(
        self, event: LayoutRequested, commands: list[Command], state: ControllerState
    ) -> None:
        """Each layout request is answered once; a refused one changes nothing, an accepted one
        applies."""
        [answer] = [command for command in commands if isinstance(command, LayoutAnswered)]
        assert answer.request == event.request
        if answer.refusal:
            assert self._target_layout == state.layouts.target, "refused, and yet adopted"
            assert not any(isinstance(command, Form | Pause) for command in commands)
        else:
            assert state.layouts.target == replace(
                event.target_layout, max_workers=state.policy.max_workers
            )
            assert not (isinstance(state.phase, Running) and state.layouts.former), "put off"

    def _check_record(self, command: RecordStep) -> None:
        step = command.record.step
        assert step == self._recorded_step + 1, "invariant 8: a line is missing or doubled"
        self._recorded_step = step
        self._generation_of[step] = command.record.generation

    def _check_roll_back(self, command: RolledBack, state: ControllerState) -> None:
        """The recovery rule: never to a step older than one that live workers and snapshot servers
        together cover. Snapshots of void steps do not count, nor does what a standby worker still
        has of a generation before the one that committed the newest step."""
        assert command.step < command.from_step
        self._recorded_step = command.step
        if command.cause:  # the rollback undoes the live state
            assert command.step <= state.checkpoints.voided[-1].step, "not far enough back"
            assert bool(command.skipped_batches) == ("spiked" in command.cause)
            self._has_rolled_back = True
            self._generation_of = {
                s: g for s, g in self._generation_of.items() if s <= command.step
            }
            return
        live_parts = self._parts(state.membership.warm)
        if self._has_rolled_back:  # standby workers may still hold undone steps
            live_parts = [
                (w, part) for w, part in live_parts if self._stands(part, command.from_step)
            ]
        oldest = self._generation_of.get(command.from_step, 0)
        ready_parts = [
            part
            for w, part in live_parts
            if (w, part.assignment.generation) in self._ready
            and part.assignment.generation >= oldest
        ]
        reported = [part for parts in self._kept.values() for part in parts]
        valid_snapshots = [
            p for p in (*reported, *self._remade()) if self._stands(p, command.from_step)
        ]
        covered = newest_covered([*ready_parts, *valid_snapshots])
        assert covered <= command.step, f"rolled back from step {covered}, which is held"

    def _remade(self) -> Iterator[Part]:
        """The parts that parities rebuild: all but one of a set are on the servers with their
        parities."""
        holders: dict[tuple[object, ...], dict[str, Part]] = {}
        for node, slots in self._parities.items():
            for slot in slots:
                key = (slot.members, slot.generation, slot.step)
                for part in self._kept.get(node, []):
                    is_same_step = part.lineage.step == slot.step
                    is_same = part.assignment.generation == slot.generation and is_same_step
                    if is_same and part.regions == regions_under(part.assignment, slot.member):
                        holders.setdefault(key, {})[slot.member] = part
        for (members, *_), parts in holders.items():
            assert isinstance(members, tuple)
            missing = [member for member in members if member not in parts]
            if len(missing) == 1:
                other = next(iter(parts.values()))
                regions = regions_under(other.assignment, missing[0])
                pieces = {i: other.lineage.values(i, region) for i, region in regions.items()}
                yield Part(other.assignment, other.lineage, regions, pieces)

    def _stands(self, part: Part, newest_step: int) -> bool:
        """Whether the part is of the recorded lineage, up to this step."""
        recorded = tuple(self._generation_of.get(step + 1) for step in range(part.lineage.step))
        return part.lineage.step <= newest_step and part.lineage.generations == recorded

    def _check_roster(self, state: ControllerState) -> None:
        """The core waits only for workers that exist (invariant 9)."""
        assert state.membership.warm <= state.membership.records.keys()
        assert state.membership.draining <= state.membership.records.keys()
        assert all(held.holders <= state.membership.warm for held in state.live.holdings())
        if isinstance(state.phase, Forming | Resharding | Pausing | Aborting):
            assert state.phase.pending <= state.membership.warm, (
                f"waits for a dead worker: {state.phase}"
            )
        for upload in state.checkpoints.uploads.values():
            assert upload.pending <= state.membership.warm, f"waits for a dead worker: {upload}"

    def _check_progress(self, now: float, state: ControllerState) -> None:
        phase = state.phase
        trains = isinstance(phase, Running) and phase.num_commits > 0
        if trains or isinstance(phase, Waiting | Ended):
            self._well_at = now
        assert now - self._well_at <= self._bound_s, f"invariant 9: stuck in {phase}"

    def _check_stale(self, now: float, event: Event, core: Core) -> None:
        """Invariant 6: a report of an older generation changes nothing."""
        if isinstance(event, GENERATION_BOUND):
            self._old_reports.append(event)
        drawn = self._drawn_ahead.popleft() if self._drawn_ahead else self._random.random()
        if drawn > 0.005 or not self._old_reports:
            return
        stale = self._random.choice(self._old_reports)
        if stale.generation >= core.state.generation or getattr(stale, "kind", "") == "device":
            return
        without, with_stale = Core(deepcopy(core.state)), Core(deepcopy(core.state))
        expected = without.step(now, Progressed(generation=-1))
        assert with_stale.step(now, stale) == expected, f"invariant 6: {stale} leads to commands"
        assert with_stale.state == without.state, f"invariant 6: {stale} changes the state"


def check_mesh(assignment: Assignment) -> None:
    """Invariant 1."""
    layout, members = assignment.layout, assignment.members
    ranks = range(layout.num_workers)
    assert len(set(members)) == len(members) == layout.num_workers, "invariant 1: no bijection"
    for rank in ranks:
        assert layout.world_rank(layout.coordinates(rank)) == rank, "invariant 1: no inverse"
    for axis in AXES:
        grouped = [rank for group in layout.groups(axis) for rank in group]
        assert sorted(grouped) == list(ranks), f"invariant 1: {axis} groups do not partition"


def check_shares(form: Form, num_microbatches: int) -> None:
    """Shares are of all microbatches, and only members that stay together have some."""
    old, new = form.plan.old, form.assignment
    if new.shares:
        assert old and (old.layout, old.members) == (new.layout, new.members), "others' shares"
        assert sum(new.shares) == num_microbatches, "invariant 5: shares of another batch"
        assert min(new.shares) >= 1, "a rank without a microbatch"


def newest_covered(parts: Iterable[Part]) -> int:
    """The newest step whose parts, all of one assignment, hold every element; -1 if there is
    none."""
    groups: dict[tuple[int, tuple[int, ...]], list[Part]] = {}
    for part in parts:
        key = (part.assignment.generation, part.lineage.generations)
        groups.setdefault(key, []).append(part)
    return max((len(key[1]) for key, group in groups.items() if _covers(group)), default=-1)


def _covers(parts: list[Part]) -> bool:
    for tensor, spec in enumerate(SPECS):
        whole = Region.whole(spec.shape)
        held = {i for p in parts if tensor in p.regions for i in places(whole, p.regions[tensor])}
        if len(held) < whole.num_elements:
            return False
    return True
