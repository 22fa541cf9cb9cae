"""A simulated training thread: it handles commands step by step as the real one does."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

from sim.control import Control, Raised
from sim.lineage import SPECS, Part, regions_under
from sim.snapshots import Snapshots
from sim.state_transfer import Moving, from_checkpoint
from sim.storage import Written
from sim.timeline import Body, GroupBroken
from sim.writer import PartWriter

from elastic.controller.audit import compare
from elastic.geometry.sample_order import batch_ids, deal
from elastic.protocol.commands import (
    Abort,
    Form,
    Reshard,
    Resume,
    RollForward,
    SaveCheckpoint,
    SendRecords,
)
from elastic.protocol.events import (
    Audited,
    CheckpointDamaged,
    ComputeTimed,
    Evaluated,
    GroupFormed,
    Paused,
    Quiesced,
    RolledForward,
    StateReady,
    StepCommitted,
)
from elastic.protocol.step_records import NUM_REPORTED_RECORDS, RecordRing, RecordsSent
from elastic.protocol.votes import Ballot, StepRecord, Vote, pack_vote, unpack_vote
from elastic.reshard.checkpoint_shards import tensors_to_write

NOTHING_HELD = -1
SAMPLES_PER_MICROBATCH = 2


@dataclass
class Stepper:
    """One rank's steps in one generation."""

    committed_step: int
    vote: Vote | None = None
    compute_s: tuple[float, ...] = ()
    gradients_complete: bool = False
    torn: bool = False


class Trainer:
    """A worker's part of the state and its changes; `holdings` are as in the real trainer."""

    def __init__(self, control: Control, writer: PartWriter) -> None:
        self._control = control
        self._around = control.around
        self._writer = writer
        self._order: Form
        self._held_step = NOTHING_HELD
        self._skipped_batches: tuple[int, ...] = ()
        self._began = 0.0
        self._records = RecordRing(control.around.num_kept_records)
        self._known_step = 0
        self.snapshots = Snapshots(control)
        self.holdings: dict[int, Part] = {}
        self.stepper: Stepper | None = None

    def form(self, order: Form) -> Body:
        control, self._order = self._control, order
        self._leave_generation()
        old = order.plan.old.generation if order.plan.old else 0
        is_holder = control.name in order.plan.holders
        if is_holder and (old not in self.holdings or self._held_step != order.plan.step):
            raise Raised("holding")
        self._records.truncate(order.plan.step if is_holder else 0)
        if not is_holder:
            old = 0
        self.holdings = {g: part for g, part in self.holdings.items() if g == old}
        control.check()
        yield from control.at("forming")
        if order.store_port != self._around.store_port:
            raise GroupBroken("the store is gone")
        yield from control.meet("form", order)
        control.check()
        members = order.assignment.members
        control.world_rank = members.index(control.name) if control.name in members else None
        yield self._around.draw(*self._around.form_s)
        yield from control.at("formed")
        control.report(GroupFormed(control.name, order.generation))

    def reshard(self, command: Reshard) -> Body:
        control, plan, assignment = self._control, self._order.plan, self._order.assignment
        yield from control.at("resharding")
        if command.source in ("live", "snapshot"):
            part = yield from self._move()
        elif command.path in self._around.storage.damaged:
            damage = (control.name, command.generation, command.path, "a flipped bit")
            control.report(CheckpointDamaged(*damage))
            return
        else:
            checkpoint = self._around.storage.visible.get(command.path)
            assert command.source == "initial" or checkpoint, f"nothing is at {command.path!r}"
            yield self._around.draw(0.01, 0.05)
            part = from_checkpoint(checkpoint, assignment, control.name)
        yield from control.at("resharded")
        if control.name in assignment.members:
            assert part.lineage.step == plan.step, "invariant 3: another step than the plan's"
            assert part.is_whole(), "invariant 3: an element is not what it should be"
            self.holdings[assignment.generation] = part
            self.stepper = Stepper(plan.step)
        control.report(StateReady(control.name, command.generation, 0, 0, 0.0, 1, 1, 2))

    def train(self, resume: Resume) -> Body:
        control, job, generation = self._control, self._around.job, resume.generation
        if control.name in resume.released:
            self._forget_state()
            return
        assert self.stepper
        stepper = self.stepper
        assert stepper.committed_step == resume.step, "invariant 8: resumed from another step"
        self._skipped_batches = resume.skipped_batches
        evaluated_step = resume.evaluated_step
        self._writer.begun_step = min(self._writer.begun_step, resume.step)
        while True:
            if self._evaluation_is_due(stepper.committed_step, evaluated_step):
                evaluated_step = stepper.committed_step
                yield from control.work(self._around.draw(0.02, 0.04))
                if control.world_rank == 0:
                    control.report(Evaluated(generation, evaluated_step, 1.0))
            if stepper.committed_step >= job.steps:
                break
            if stepper.committed_step + 1 == resume.guarded_step:
                yield from self._guard(generation, stepper.committed_step)
            vote = yield from self._cast(stepper)
            record = yield from self._apply(stepper, vote)
            if control.world_rank == 0:
                control.report(StepCommitted(generation, record, vote))
                if stepper.compute_s:
                    control.report(ComputeTimed(generation, record.step, stepper.compute_s))
            self.snapshots.take(self.holdings[generation], self._around.snapshot_every)
            yield from control.at("reported")
            is_equal = yield from self._audit(record.step)
            if not is_equal:
                break
            if vote.saves(job.checkpoint_every):
                self._save(generation, record.step, self.holdings[generation], None)
            if vote.num_pause_requests and record.step < job.steps:
                break
        yield from self.snapshots.wait()
        control.report(Paused(control.name, generation, stepper.committed_step))
        yield from control.at("paused")

    def _guard(self, generation: int, step: int) -> Body:
        """The next step has ended workers before: the state is durable before it begins."""
        if (self._writer.begun_step, self._writer.begun_generation) != (step, generation):
            self._save(generation, step, self.holdings[generation], None)
        while self._writer.is_busy:
            yield from self._control.work(0.01)

    def roll_forward(self, command: RollForward) -> Body:
        control = self._control
        assert self.stepper
        try:
            yield from control.at("rolling_forward")
            record = yield from self._apply(self.stepper, command.vote)
        except Raised:
            self.stepper.torn = True
            yield from self._report_quiesced(command.generation)
            raise
        control.report(RolledForward(control.name, command.generation, record))
        yield from control.at("rolled_forward")

    def save(self, command: SaveCheckpoint) -> Body:
        part = self.holdings[command.held_generation]
        self._save(command.generation, command.step, part, command.workers)
        yield from self._control.at("saving")

    def quiesce(self, command: Abort) -> Body:
        """Report this worker's step, and the records that the controller lacks."""
        self._around.meetings.leave(self._control.name)
        self._known_step = command.committed_step
        yield self._around.draw(*self._around.unwind_s)
        yield from self._control.at("quiescing")
        yield from self._report_quiesced(command.generation)

    def _report_quiesced(self, generation: int) -> Body:
        control, stepper = self._control, self.stepper
        self._around.meetings.leave(control.name)
        records = self._records.after(self._known_step, NUM_REPORTED_RECORDS + 1)
        missing = records if len(records) <= NUM_REPORTED_RECORDS else ()
        at = self._held_step, None, False, False
        if stepper is not None:
            yield 0.0
            step, vote = stepper.committed_step, stepper.vote
            at = step, vote, stepper.gradients_complete, stepper.torn
        report = Quiesced(control.name, generation, *at, missing, self._writer.begun_step)
        control.report(report)

    def send_records(self, command: SendRecords) -> None:
        """Answer at once, beside training."""
        records = self._records.after(command.committed_step, self._around.num_sent_records)
        vote = self.stepper.vote if self.stepper else None
        name, generation = self._control.name, command.generation
        self._control.report(RecordsSent(name, generation, records, vote))

    def _move(self) -> Body:
        plan = self._order.plan
        assert plan.old
        held = self.holdings.get(plan.old.generation)
        moving = Moving.of(plan, self._control.name, held, self._around.snapshot_servers)
        brought = yield from self._control.meet(
            "move", self._order, 0, moving.outgoing(), moving.sources
        )
        return moving.assemble(self._control.name, brought)

    def _cast(self, stepper: Stepper) -> Body:
        """Compute and vote; the vote is read on the host before anything is applied."""
        control, around, step = self._control, self._around, stepper.committed_step + 1
        yield from control.at("compute")
        self._began = around.timeline.now
        compute_s = control.slowness * self._relative_share * around.draw(*around.step_s)
        yield from control.work(compute_s)
        yield from self.snapshots.wait()
        yield from control.at("vote")
        stepper.gradients_complete = True
        loss, control.next_loss = control.next_loss, 1.0
        is_bad, control.num_nans = control.num_nans > 0, max(0, control.num_nans - 1)
        every, members = around.straggler_every, self._order.assignment.members
        is_timed, rank = bool(every) and step % every == 0, members.index(control.name)
        times = [compute_s if i == rank else 0.0 for i in range(len(members))]
        ballot = Ballot(
            step,
            rank,
            (nan if is_bad else loss, 1.0, 1.0),
            control.is_pause_requested,
            self.snapshots.whole_order,
            control.is_save_requested_by_vote(self._writer.begun_step),
            self._writer.is_busy,
            tuple(times) if is_timed else (),
        )
        cast = (*self._samples(step), pack_vote(ballot))
        brought = yield from control.meet("vote", self._order, step, cast)
        by_rank = {data_rank: ids for data_rank, ids, *_ in brought.values()}
        read = sorted(sample_id for ids in by_rank.values() for sample_id in ids)
        expected = list(batch_ids(step, self._batch, self._skipped_batches))
        assert read == expected, "invariant 5: samples lost or repeated"
        around.read[self._order.generation, step] = read
        voted = (self._order.generation, step)
        assert voted >= around.newest_vote, "invariant 6: two generations run"
        around.newest_vote = voted
        places = zip(*(numbers for *_, numbers in brought.values()), strict=True)
        tally = unpack_vote([sum(place) for place in places], step, len(brought))
        stepper.vote, stepper.compute_s = tally.vote, tally.compute_s
        self.snapshots.note(tally.vote.num_snapshots, len(brought))
        yield from control.at("read")
        return stepper.vote

    def _apply(self, stepper: Stepper, vote: Vote) -> Body:
        """Local, and never interrupted."""
        newest = max(self.holdings)
        part = self.holdings[newest]
        assert vote.step == part.lineage.step + 1, "invariant 8: a step skipped or applied twice"
        stepper.torn = True
        yield 0.002
        skipped = vote.num_nonfinite > 0
        for _ in part.apply(vote.step, newest, skipped):
            yield from self._control.at("apply")
        stepper.torn = False
        self.holdings = {newest: part}
        stepper.committed_step = vote.step
        stepper.gradients_complete = False
        now, world_size = self._around.timeline.now, self._order.assignment.layout.num_workers
        loss = None if skipped else vote.loss_sum / vote.num_tokens
        step_s = sum(self._around.step_s) / 2
        if self._around.straggler_every:
            step_s = now - self._began
        record = StepRecord(now, vote.step, newest, world_size, loss, 1, 0.1, 1.0, step_s, skipped)
        self._records.append(record)
        yield from self._control.at("applied")
        return record

    def _save(
        self, generation: int, step: int, part: Part, writers: tuple[str, ...] | None
    ) -> None:
        assert part.lineage.step == step, "invariant 8: saved as another step"
        share = tensors_to_write(
            SPECS, part.assignment, writers or part.assignment.members, self._control.name
        )
        tensors = {i: (part.regions[i], list(part.pieces[i])) for i in share}
        self._writer.write(step, generation, Written(part.lineage, tensors))

    @property
    def _batch(self) -> int:
        return self._around.job.num_microbatches * SAMPLES_PER_MICROBATCH

    @property
    def _data_rank(self) -> int:
        assignment = self._order.assignment
        return assignment.layout.data_rank(assignment.world_rank(self._control.name))

    @property
    def _dealt(self) -> list[tuple[int, ...]]:
        assignment, num_microbatches = self._order.assignment, self._around.job.num_microbatches
        return deal(num_microbatches, assignment.layout.num_data_ranks, assignment.shares)

    @property
    def _relative_share(self) -> float:
        """How many microbatches this worker computes, relative to a mean share."""
        if not self._order.assignment.shares:
            return 1.0
        dealt = self._dealt
        return len(dealt[self._data_rank]) * len(dealt) / self._around.job.num_microbatches

    def _samples(self, step: int) -> tuple[int, list[int]]:
        """This data rank, and the ids of the samples that it reads for a step."""
        data_rank = self._data_rank
        dealt = self._dealt[data_rank]
        ids = batch_ids(step, self._batch, self._skipped_batches)
        return data_rank, [i for i in ids if (i - ids[0]) // SAMPLES_PER_MICROBATCH in dealt]

    def _audit(self, step: int) -> Body:
        """Whether all replicas are equal; a faulty worker reports a wrong checksum."""
        every, control, assignment = self._around.audit_every, self._control, self._order.assignment
        if not every or step % every:
            return True
        regions = regions_under(assignment, control.name)
        part = int.from_bytes(repr(sorted(regions.items())).encode(), "big")
        brought = yield from control.meet(
            "audit", self._order, step, (part, control.falsifies_checksum)
        )
        members = assignment.members
        reports = [brought[worker] for worker in members]
        num_replicas, splits = compare(
            members, [p for p, _ in reports], [int(is_wrong) for _, is_wrong in reports]
        )
        if splits or control.world_rank == 0:
            control.report(Audited(self._order.generation, step, num_replicas, splits))
        return not splits

    def _evaluation_is_due(self, step: int, evaluated_step: int) -> bool:
        every = self._around.eval_every
        return bool(every) and step > evaluated_step and step % every == 0

    def _leave_generation(self) -> None:
        self.snapshots.end_generation()
        if self.stepper is not None:
            self._held_step = self.stepper.committed_step
        self.stepper = None

    def _forget_state(self) -> None:
        self._leave_generation()
        self.holdings.clear()
        self._held_step = NOTHING_HELD
