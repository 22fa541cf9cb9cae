"""What must hold after every event; the numbers are those of DESIGN.md, section 10."""

from __future__ import annotations

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
    LayoutAnswered,
    Pause,
    QuerySnapshotServers,
    RecordStep,
    Resume,
    RolledBack,
)
from elastic.protocol.commands import Stopped as RunStopped
from elastic.protocol.controller_state import CoreState
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
    SnapshotServerLost,
    SnapshotServerReported,
    StateReady,
    StepCommitted,
    WorkerRaised,
)
from elastic.protocol.phases import Aborting, Ended, Forming, Pausing, Resharding, Running, Waiting
from elastic.protocol.step_records import RecordsSent
from elastic.reshard.snapshot_placement import ParitySlot

GENERATION_BOUND = (
    GroupFormed
    | StateReady
    | StepCommitted
    | ComputeTimed
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
        """`parts` tells what living workers, of those named, really hold, `snapshots` what a
        keeper really has of what it told of."""
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
        self._has_rewound = False
        self._target_layout = TargetLayout()
        self._old_reports: list[Event] = []

    def note_fault(self, now: float) -> None:
        self._well_at = max(self._well_at, now)

    def note_restart(self, committed_step: int) -> None:
        """The journal knows of the steps up to this one; later ones are reported again, or lost."""
        self._recorded_step = min(self._recorded_step, committed_step)

    def after(self, now: float, event: Event, commands: list[Command], core: Core) -> None:
        """Look at one event's outcome."""
        state = core.state
        if isinstance(event, GroupFormed):
            self._formed.add((event.worker, event.generation))
        if isinstance(event, StateReady):
            self._ready.add((event.worker, event.generation))
        if isinstance(event, RunOpened):
            self._kept.clear()  # the keepers have ended with the job
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
                    kept = {(saved.step, saved.generation) for saved in state.saved}
                    assert kept.isdisjoint(command.dropped), "dropped, and counted on"
                case QuerySnapshotServers():
                    self._kept.clear()
        if isinstance(event, LayoutRequested):
            self._check_answer(event, commands, state)
        self._check_roster(state)
        self._check_progress(now, state)
        self._check_stale(now, event, core)
        self._target_layout = state.target_layout

    def after_end(
        self,
        outcome: RunStopped,
        state: CoreState,
        records: Records,
        storage: Storage,
        read: dict[tuple[int, int], list[int]],
    ) -> None:
        """The steps are 1..n, each once in the history that survived, and that is saved; what they
        read is all the data from the beginning on, but for what was left out on purpose."""
        run_status = [one for one in storage.whole() if state.stands(one.step, one.generation)]
        newest, num_steps = next(reversed(run_status), None), state.job.steps
        if newest is None or newest.step < outcome.step:
            assert outcome.outcome != "completed", "invariant 11: completed, but not saved"
            return
        assert outcome.outcome != "completed" or newest.step == num_steps
        lines = [(line.record.generation, line.record.step) for line in records.metrics]
        assert len(set(lines)) == len(lines), "invariant 8: a line is doubled"
        last = {line.record.step: line.record.generation for line in records.metrics}
        kept = storage.visible[newest.path].lineage.generations
        told = tuple(last[step + 1] for step in range(newest.step))
        assert told == kept, f"invariant 8: the lines tell of {told}, the state of {kept}"
        batches = [read[generation, step] for step, generation in enumerate(told, start=1)]
        rest = (number for number in count() if number not in state.skipped_batches)
        for batch, number in zip(batches, rest, strict=False):
            first = number * len(batch)
            assert batch == list(range(first, first + len(batch))), "invariant 5: other samples"

    def _check_form(self, form: Form, state: CoreState) -> None:
        assert form.generation > self._generation, "invariant 6: a generation again"
        self._generation = form.generation
        taken_in, self._form = self._form, form
        check_mesh(form.assignment)
        staying = sorted(state.warm - state.draining)
        self._check_nodes(form, taken_in, state)
        assert set(form.assignment.members) <= set(staying), "a rank for one who is not there"
        memories = [m for w in staying if (m := state.worker_records[w].memory_bytes) is not None]
        shuffled = self._random.sample(staying, len(staying))
        again = assign(
            form.plan.old,
            shuffled,
            generation=form.generation,
            target_layout=state.target_layout,
            topology={w: state.worker_records[w].place for w in shuffled},
            job=state.job,
            memory_bytes=min(memories, default=None),
        )
        assert again == form.assignment, "invariant 2: the order of arrival decides"

    def _check_nodes(self, form: Form, taken_in: Form | None, state: CoreState) -> None:
        """Nobody comes in on an avoided node while there are enough others; who has been taken in
        by a forming that was broken off may have a part of the state, and stays."""
        before = set(taken_in.assignment.members if taken_in else ())
        before |= {*(form.plan.old.members if form.plan.old else ()), *self._members}
        quarantined = {
            w for w in state.warm if state.worker_records[w].node in state.quarantined
        } - before
        num_others = len(state.warm - state.draining - quarantined)
        if num_others >= state.policy.min_workers:
            assert quarantined.isdisjoint(form.assignment.members), "a rank on an avoided node"

    def _check_resume(self, resume: Resume) -> None:
        self._members = resume.workers
        assert self._form, "invariant 7: resumed what was never formed"
        assert resume.generation == self._form.generation, "invariant 6: resumed an older one"
        everyone = {(worker, resume.generation) for worker in self._form.plan.participants}
        assert everyone <= self._formed, "invariant 7: resumed before all groups were formed"
        assert everyone <= self._ready, "invariant 7: resumed before all state was there"

    def _check_answer(
        self, event: LayoutRequested, commands: list[Command], state: CoreState
    ) -> None:
        """Each wish is answered once; what is refused changes nothing, the rest is taken up."""
        [answer] = [command for command in commands if isinstance(command, LayoutAnswered)]
        assert answer.request == event.request
        if answer.refusal:
            assert self._target_layout == state.target_layout, (
                "refused, and yet the wish is another"
            )
            assert not any(isinstance(command, Form | Pause) for command in commands)
        else:
            assert state.target_layout == replace(
                event.target_layout, max_workers=state.policy.max_workers
            )
            assert not (isinstance(state.phase, Running) and state.former_target), "put off"

    def _check_record(self, command: RecordStep) -> None:
        step = command.record.step
        assert step == self._recorded_step + 1, "invariant 8: a line is missing or doubled"
        self._recorded_step = step
        self._generation_of[step] = command.record.generation

    def _check_roll_back(self, command: RolledBack, state: CoreState) -> None:
        """The rule of recovery: never to a step older than one that the living and the keepers
        cover between them; what a keeper has of steps that were given up does not count."""
        assert command.step < command.from_step
        self._recorded_step = command.step
        if command.cause:  # what is held is what shall be undone
            assert command.step <= state.voided[-1].step, "not far enough back"
            assert bool(command.skipped_batches) == ("spiked" in command.cause)
            self._has_rewound = True
            self._generation_of = {
                s: g for s, g in self._generation_of.items() if s <= command.step
            }
            return
        held = self._parts(state.warm)
        if self._has_rewound:  # spares may still have what has been undone
            held = [(w, part) for w, part in held if self._stands(part, command.from_step)]
        known = [part for w, part in held if (w, part.assignment.generation) in self._ready]
        told = [part for parts in self._kept.values() for part in parts]
        kept = [p for p in (*told, *self._remade()) if self._stands(p, command.from_step)]
        covered = newest_covered([*known, *kept])
        assert covered <= command.step, f"rolled back from step {covered}, which is held"

    def _remade(self) -> Iterator[Part]:
        """What parities bring back: all but one of a set are where their parities are."""
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
            lost = [member for member in members if member not in parts]
            if len(lost) == 1:
                other = next(iter(parts.values()))
                regions = regions_under(other.assignment, lost[0])
                pieces = {i: other.lineage.values(i, region) for i, region in regions.items()}
                yield Part(other.assignment, other.lineage, regions, pieces)

    def _stands(self, part: Part, newest_step: int) -> bool:
        told = tuple(self._generation_of.get(step + 1) for step in range(part.lineage.step))
        return part.lineage.step <= newest_step and part.lineage.generations == told

    def _check_roster(self, state: CoreState) -> None:
        """Nobody is waited for who is not there (invariant 9)."""
        assert state.warm <= state.worker_records.keys()
        assert state.draining <= state.worker_records.keys()
        assert all(held.holders <= state.warm for held in state.holdings())
        if isinstance(state.phase, Forming | Resharding | Pausing | Aborting):
            assert state.phase.pending <= state.warm, f"waits for the dead: {state.phase}"
        for upload in state.uploads.values():
            assert upload.pending <= state.warm, f"waits for the dead: {upload}"

    def _check_progress(self, now: float, state: CoreState) -> None:
        phase = state.phase
        trains = isinstance(phase, Running) and phase.num_commits > 0
        if trains or isinstance(phase, Waiting | Ended):
            self._well_at = now
        assert now - self._well_at <= self._bound_s, f"invariant 9: stuck in {phase}"

    def _check_stale(self, now: float, event: Event, core: Core) -> None:
        """Invariant 6: what comes from an older generation changes nothing."""
        if isinstance(event, GENERATION_BOUND):
            self._old_reports.append(event)
        if self._random.random() > 0.005 or not self._old_reports:
            return
        stale = self._random.choice(self._old_reports)
        if stale.generation >= core.state.generation or getattr(stale, "kind", "") == "device":
            return
        nothing, something = Core(deepcopy(core.state)), Core(deepcopy(core.state))
        expected = nothing.step(now, Progressed(generation=-1))
        assert something.step(now, stale) == expected, f"invariant 6: {stale} leads to something"
        assert something.state == nothing.state, f"invariant 6: {stale} changes the state"


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


def newest_covered(parts: Iterable[Part]) -> int:
    """The newest step of which parts of one assignment hold every element; -1 if none."""
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
