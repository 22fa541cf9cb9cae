"""A simulated worker: it answers commands as `actors/worker.py` and `actors/trainer.py` do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from elastic.commands import Abort, Form, Pause, Relayout, Resume, SaveCheckpoint, Settle
from elastic.events import (
    Evaluated,
    Event,
    GroupFormed,
    PartFailed,
    PartWritten,
    Paused,
    Quiesced,
    Settled,
    StateReady,
    StepCommitted,
    WorkerRaised,
    WorkerReady,
)
from elastic.parts import my_share
from elastic.planning import Job
from elastic.samples import batch_ids, deal
from elastic.votes import StepRecord, Vote
from sim.lineage import SPECS, Part, regions_under
from sim.meetings import Meetings
from sim.moving import fetch_live, read_checkpoint
from sim.storage import PartFile, Storage
from sim.timeline import Block, Body, GroupBroken, Thread, Timeline

Order = Abort | Form | Relayout | Resume | Pause | Settle | SaveCheckpoint
NOTHING_HELD = -1
NUM_KEPT_RECORDS = 64
SAMPLES_PER_MICROBATCH = 2


class Interrupted(Exception):
    """The generation is being aborted: unwind."""


class Raised(Exception):
    """What a fault makes a worker raise; `kind` as in `WorkerRaised`."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"told to raise: {kind}")
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
    report: Callable[[SimWorker, Event], None]
    at: Callable[[SimWorker, str], None]
    store_port: int = 0
    newest_vote: tuple[int, int] = (0, 0)

    def draw(self, low_s: float, high_s: float) -> float:
        return self.random.uniform(low_s, high_s)


@dataclass
class Stepper:
    """One rank's steps in one generation."""

    committed_step: int
    vote: Vote | None = None
    gradients_complete: bool = False
    torn: bool = False
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=NUM_KEPT_RECORDS))


class SimWorker:
    """One process: a training thread, a thread that writes parts, and a control side."""

    def __init__(
        self, name: str, node: str, memory_bytes: int | None, warm_up_s: float, around: Surroundings
    ) -> None:
        self.name = name
        self.node = node
        self.memory_bytes = memory_bytes
        self.around = around
        self.alive = True
        self.frozen = False
        self.deaf = False
        self.next_error = ""
        self.holdings: dict[int, Part] = {}
        self.stepper: Stepper | None = None
        self.world_rank: int | None = None
        self._warm_up_s = warm_up_s
        self._held_step = NOTHING_HELD
        self._orders: deque[Order] = deque()
        self._parts: deque[tuple[int, int, PartFile]] = deque()
        self._aborted_generation = 0
        self._running_generation = 0
        self._pause_wished_generation = 0
        self._training = Thread(around.timeline, self._train_for_life())
        self._writing = Thread(around.timeline, self._write_for_life())

    # The control side, which never blocks.

    def take(self, order: Order) -> None:
        """A command arrives; an abort acts at once, all else queues."""
        if self.frozen or not self.alive:
            return
        if isinstance(order, Pause):
            self._pause_wished_generation = order.generation
            return
        if isinstance(order, Abort):
            self._aborted_generation = max(self._aborted_generation, order.generation)
            if self._training.waiting_on == "peers":
                self._training.interrupt(GroupBroken("broken off"), self._break_off_s())
        self._orders.append(order)
        if self._training.waiting_on == "orders":
            self._training.wake(None, 0.0)

    def die(self) -> None:
        self.alive = False
        self._training.stop()
        self._writing.stop()
        self.around.meetings.leave(self.name)

    def freeze(self) -> None:
        """As SIGSTOP does: nothing moves any more, nothing is answered."""
        self.frozen = True
        self._training.stop()
        self._writing.stop()

    def hang(self) -> None:
        """The training thread alone is stuck, and hears no abort."""
        self._training.stop()

    def newest_part(self) -> Part | None:
        """What it holds, as far as whole."""
        if not self.holdings or (self.stepper and self.stepper.torn):
            return None
        return self.holdings[max(self.holdings)]

    # The training thread.

    def _train_for_life(self) -> Body:
        yield self._warm_up_s
        yield from self._at("starting")
        self._report(WorkerReady(self.name, self.node, 1, memory_bytes=self.memory_bytes))
        while True:
            while not self._orders:
                yield Block("orders")
            order = self._orders.popleft()
            try:
                yield from self._obey(order)
            except Interrupted:
                continue
            except (GroupBroken, Raised) as error:
                self.around.meetings.leave(self.name)
                if order.generation > self._aborted_generation:
                    kind = error.kind if isinstance(error, Raised) else "peer"
                    self._report(WorkerRaised(self.name, order.generation, kind, str(error)))

    def _obey(self, order: Order) -> Body:
        if isinstance(order, Form | Relayout | Resume):
            self._running_generation = order.generation
            self._check()
        match order:
            case Form():
                yield from self._form(order)
            case Relayout():
                yield from self._relayout(order)
            case Resume():
                yield from self._train(order)
            case Settle():
                yield from self._settle(order)
            case SaveCheckpoint():
                part = self.holdings[order.held_generation]
                assert part.lineage.step == order.step, "invariant 8: saved as another step"
                self._save(order.generation, order.step, order.held_generation, order.workers)
                yield from self._at("saving")
            case Abort():
                yield from self._quiesce(order.generation)

    def _form(self, order: Form) -> Body:
        self._form_order = order
        self._leave_generation()
        old = order.plan.old.generation if order.plan.old else 0
        self.holdings = {g: part for g, part in self.holdings.items() if g == old}
        self._check()
        yield from self._at("forming")
        if order.store_port != self.around.store_port:
            raise GroupBroken("the store is gone")
        yield from self._meet("form", 0)
        self._check()
        members = order.assignment.members
        self.world_rank = members.index(self.name) if self.name in members else None
        yield self.around.draw(0.01, 0.03)
        yield from self._at("formed")
        self._report(GroupFormed(self.name, order.generation))

    def _relayout(self, command: Relayout) -> Body:
        plan, assignment = self._form_order.plan, self._form_order.assignment
        yield from self._at("relaying")
        if command.source == "live":
            part = yield from self._fetch_live()
        else:
            checkpoint = self.around.storage.visible.get(command.path)
            assert command.source == "initial" or checkpoint, f"nothing is at {command.path!r}"
            yield self.around.draw(0.01, 0.05)
            part = read_checkpoint(checkpoint, regions_under(assignment, self.name))
        yield from self._at("relaid")
        if self.name in assignment.members:
            assert part.lineage.step == plan.step, "invariant 3: of another step than chosen"
            assert part.is_whole(), "invariant 3: an element is not what it should be"
            self.holdings[assignment.generation] = part
            self.stepper = Stepper(plan.step)
        self._report(StateReady(self.name, command.generation, 0, 0, 0.0, 1, 1, 2))

    def _fetch_live(self) -> Body:
        plan = self._form_order.plan
        held = self.holdings.get(plan.old.generation) if plan.old else None
        moving = fetch_live(plan, self.name, held)
        brought = yield from self._meet("move", 0, moving.outgoing, moving.sources)
        return moving.assemble(brought)

    def _train(self, resume: Resume) -> Body:
        if self.name in resume.released:
            self._forget_state()
            return
        assert self.stepper
        stepper, generation = self.stepper, resume.generation
        assert stepper.committed_step == resume.step, "invariant 8: resumed from another step"
        evaluated_step = resume.evaluated_step
        while True:
            if self._evaluation_is_due(stepper.committed_step, evaluated_step):
                evaluated_step = stepper.committed_step
                yield from self._work(self.around.draw(0.02, 0.04))
                if self.world_rank == 0:
                    self._report(Evaluated(generation, evaluated_step, 1.0))
            if stepper.committed_step >= self.around.job.steps:
                break
            vote = yield from self._cast(stepper)
            record = yield from self._apply(stepper, vote, generation)
            if self.world_rank == 0:
                self._report(StepCommitted(generation, record, vote))
            yield from self._at("reported")
            every = self.around.job.checkpoint_every
            if every and record.step % every == 0:
                self._save(generation, record.step, generation, None)
            if vote.num_pause_wishes:
                break
        self._report(Paused(self.name, generation, stepper.committed_step))
        yield from self._at("paused")

    def _cast(self, stepper: Stepper) -> Body:
        """Compute and vote; the vote is read on the host before anything is applied."""
        yield from self._at("compute")
        yield from self._work(self.around.draw(0.02, 0.05))
        yield from self._at("vote")
        step, generation = stepper.committed_step + 1, self._running_generation
        stepper.gradients_complete = True
        wish = self._pause_wished_generation >= generation
        brought = yield from self._meet("vote", step, (self._samples(step), wish))
        samples = {rank: ids for rank, ids in (ids for ids, _ in brought.values())}
        read = sorted(i for ids in samples.values() for i in ids)
        batch = self.around.job.num_microbatches * SAMPLES_PER_MICROBATCH
        assert read == list(batch_ids(step, batch)), "invariant 5: samples lost or repeated"
        assert (generation, step) >= self.around.newest_vote, "invariant 6: two generations run"
        self.around.newest_vote = (generation, step)
        num_wishes = sum(wish for _, wish in brought.values())
        stepper.vote = Vote(step, 1.0, 1, 1.0, len(brought), num_pause_wishes=num_wishes)
        yield from self._at("read")
        return stepper.vote

    def _apply(self, stepper: Stepper, vote: Vote, generation: int) -> Body:
        """Local, and never interrupted."""
        part = self.holdings[max(self.holdings)]
        assert vote.step == part.lineage.step + 1, "invariant 8: a step skipped or applied twice"
        yield 0.002
        stepper.torn = True
        yield from self._at("apply")
        stepper.torn = False
        part.apply(vote.step, generation)
        self.holdings = {max(self.holdings): part}
        stepper.committed_step = vote.step
        stepper.gradients_complete = False
        world_size = self._form_order.assignment.layout.num_workers
        now = self.around.timeline.now
        record = StepRecord(
            now, vote.step, generation, world_size, 1.0, 1, 0.1, 1.0, 0.05, skipped=False
        )
        stepper.records.append(record)
        yield from self._at("applied")
        return record

    def _settle(self, command: Settle) -> Body:
        assert self.stepper
        yield from self._at("settling")
        generation = self._form_order.assignment.generation
        record = yield from self._apply(self.stepper, command.vote, generation)
        self._report(Settled(self.name, command.generation, record))
        yield from self._at("settled")

    def _quiesce(self, generation: int) -> Body:
        """Say where this worker stands."""
        self.around.meetings.leave(self.name)
        yield self.around.draw(0.001, 0.01)
        yield from self._at("quiescing")
        stepper = self.stepper
        if stepper is None:
            self._report(Quiesced(self.name, generation, self._held_step))
            return
        self._report(
            Quiesced(
                self.name,
                generation,
                stepper.committed_step,
                stepper.vote,
                stepper.gradients_complete,
                stepper.torn,
                tuple(stepper.records),
            )
        )

    # What these are made of.

    def _at(self, moment: str) -> Iterator[float | Block]:
        """A moment at which something may happen to this worker."""
        self.around.at(self, moment)
        if self.next_error:
            kind, self.next_error = self.next_error, ""
            raise Raised(kind)
        if self.frozen or not self.alive or self._training.is_stopped:
            yield Block("nothing")

    def _check(self) -> None:
        if self._running_generation <= self._aborted_generation:
            raise Interrupted

    def _work(self, seconds: float) -> Body:
        """Busy, but asking now and then whether to go on."""
        for _ in range(3):
            self._check()
            yield seconds / 3
        self._check()

    def _meet(
        self, kind: str, step: int, brings: object = None, needs: frozenset[str] | None = None
    ) -> Body:
        """A collective of the generation: of all participants, or of the members to vote."""
        order, around = self._form_order, self.around
        if order.generation <= self._aborted_generation and not self.deaf:
            raise GroupBroken("broken off before it began")
        everyone = order.assignment.members if kind == "vote" else order.plan.participants
        key = (kind, order.generation, step)
        around.meetings.come(key, self.name, self._training, frozenset(everyone), brings, needs)
        brought = yield Block("peers", around.collective_timeout_s)
        return brought

    def _break_off_s(self) -> float:
        """A deaf worker misses the wake-up (Gloo does that) and blocks until its timeout."""
        if self.deaf:
            self.deaf = False
            return self.around.collective_timeout_s
        return self.around.draw(0.001, 0.01)

    def _samples(self, step: int) -> tuple[int, tuple[int, ...]]:
        """This data rank, and the ids of the samples that it reads for a step."""
        assignment, job = self._form_order.assignment, self.around.job
        place, layout = assignment.coordinates(self.name), assignment.layout
        data_rank = place.dp * layout.fsdp + place.fsdp
        microbatches = deal(job.num_microbatches, layout.num_data_ranks)[data_rank]
        ids = batch_ids(step, job.num_microbatches * SAMPLES_PER_MICROBATCH)
        mine = (i for i in ids if (i - ids[0]) // SAMPLES_PER_MICROBATCH in microbatches)
        return data_rank, tuple(mine)

    def _evaluation_is_due(self, step: int, evaluated_step: int) -> bool:
        every = self.around.eval_every
        return bool(every) and step > evaluated_step and step % every == 0

    def _save(
        self, generation: int, step: int, held_generation: int, writers: tuple[str, ...] | None
    ) -> None:
        part = self.holdings[held_generation]
        assignment = self._assignments[held_generation]
        share = my_share(SPECS, assignment, writers or assignment.members, self.name)
        tensors = {i: (part.regions[i], list(part.pieces[i])) for i in share}
        self._parts.append((step, generation, PartFile(part.lineage, tensors)))
        if self._writing.waiting_on == "parts":
            self._writing.wake(None, 0.0)

    def _write_for_life(self) -> Body:
        """Parts become durable in the background, one after the other."""
        while True:
            while not self._parts:
                yield Block("parts")
            step, generation, part = self._parts.popleft()
            yield self.around.draw(0.01, 0.1)
            file = f"part-{self.name}"
            self.around.at(self, "writing")
            if not self.alive or self.frozen:
                yield Block("nothing")
            if self.disk_full:
                self.disk_full = False
                self._report(PartFailed(self.name, generation, step, "no space left"))
                continue
            self.around.storage.write(step, generation, file, part)
            self._report(PartWritten(self.name, generation, step, file, part.num_bytes))

    def _leave_generation(self) -> None:
        if self.stepper is not None:
            self._held_step = self.stepper.committed_step
        self.stepper = None

    def _forget_state(self) -> None:
        self._leave_generation()
        self.holdings.clear()
        self._held_step = NOTHING_HELD

    def _report(self, event: Event) -> None:
        self.around.report(self, event)
