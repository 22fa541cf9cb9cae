"""The step protocol: compute, vote, apply. A step commits on every worker or on none."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed import Work

from actors.distributed.stall import wait_for
from actors.runtime.compute_time import ComputeTimes
from actors.runtime.faults import FaultInjector
from actors.runtime.interruption import Interruption
from actors.runtime.program import Groups, Replica
from actors.snapshots.worker_snapshots import Snapshots
from actors.storage.errors import StepMismatch, TornApply
from actors.worker.part_writer import PartWriter
from actors.worker.step_timer import StepTimer
from elastic.protocol.events import Quiesced
from elastic.protocol.step_records import NUM_REPORTED_RECORDS, NUM_SENT_RECORDS, RecordRing
from elastic.protocol.votes import Ballot, StepRecord, Vote, pack_vote, unpack_vote
from elastic.protocol.wire import finite


class KeptRecords:
    """A worker's step records: the training thread appends, any thread reads."""

    def __init__(self) -> None:
        self._ring = RecordRing()
        self._lock = threading.Lock()

    def append(self, record: StepRecord) -> None:
        with self._lock:
            self._ring.append(record)

    def after(self, step: int, limit: int = NUM_SENT_RECORDS) -> tuple[StepRecord, ...]:
        with self._lock:
            return self._ring.after(step, limit)

    def for_report(self, known_step: int) -> tuple[StepRecord, ...]:
        """The records that the controller lacks; none if a report cannot carry all of them."""
        records = self.after(known_step, NUM_REPORTED_RECORDS + 1)
        return records if len(records) <= NUM_REPORTED_RECORDS else ()

    def go_on_from(self, step: int, is_holder: bool) -> None:
        """Prepare for a generation that begins after `step`. A worker that holds the state of that
        step keeps its records. Those of any other worker may be of steps that were rolled back."""
        with self._lock:
            self._ring.truncate(step if is_holder else 0)


class Stepper:
    """One rank's steps in one generation.

    An abort reads `committed_step`, the latest `vote`, whether the gradients of the next step are
    complete (`gradients_complete`), and whether an apply broke half-way (`torn`).
    """

    def __init__(
        self,
        groups: Groups,
        replica: Replica,
        committed_step: int,
        interruption: Interruption,
        faults: FaultInjector,
        snapshots: Snapshots,
        writer: PartWriter,
        compute_times: ComputeTimes,
        records: KeptRecords,
        timer: StepTimer,
    ) -> None:
        self.skipped_batches: tuple[int, ...] = ()
        """The numbers of the batches that training skips."""
        self._snapshots = snapshots
        self._writer = writer
        self._compute_times = compute_times
        self.compute_s: tuple[float, ...] = ()
        """The compute times of all ranks, if the latest step's vote carried them."""
        self._groups = groups
        self._replica = replica
        self._interruption = interruption
        self._faults = faults
        self._began = time.perf_counter()
        self.committed_step = committed_step
        self.vote: Vote | None = None
        self.gradients_complete = False
        self.torn = False
        self._records = records
        self.timer = timer

    def step(self) -> tuple[StepRecord, Vote]:
        """Train one step. Raises if the generation is aborted or a peer is lost."""
        self._began = time.perf_counter()
        step = self.committed_step + 1
        self._compute_times.begin()
        with self._interruption.abandonable():
            self._faults.flip_a_bit(step, self._replica.tensors)
            self._faults.at("compute", step)
            with self.timer.computing():
                sums = self._replica.compute(step, self._interruption.check, self.skipped_batches)
                self._faults.poison(step, sums)
                self._faults.slow_down(step, sums.device, self._interruption.check)
            with self.timer.part("snapshot_s"):
                self._snapshots.await_whole(self._interruption.check)
            self._faults.at("vote", step)
            with self.timer.part("compute_s"):  # a GPU computes until the sums can be read
                values = sums.tolist()
            self._interruption.check()  # an aborted reduction may have returned garbage
            with self.timer.part("vote_s"):
                numbers, reduction = self._cast(step, values, sums.device)
            with self.timer.part("data_s"):
                self._replica.read_early()
            with self.timer.part("vote_s"):
                wait_for(reduction)
                vote = self._read(step, numbers)
        self.vote = vote
        with self.timer.part("snapshot_s"):
            self._writer.await_copied(self._interruption.check)
        self._faults.at("apply", step)
        record = self.apply(vote)
        self._compute_times.end(step)
        if reported := self.between_steps():
            record = replace(record, reported=reported)
            self._records.append(record)
        return record, vote

    def resume(self, skipped_batches: tuple[int, ...]) -> None:
        """Begin to train in this generation."""
        self.skipped_batches = skipped_batches
        with self._interruption.abandonable():
            self._replica.resume(self.committed_step, self._interruption.check)

    def finish(self, last_step: int) -> bool:
        """Run what follows the last step, if this is it; returns whether the program ends the run
        here."""
        if self._replica.is_done or self.committed_step >= last_step:
            with self._interruption.abandonable():
                self._replica.finish(self._interruption.check)
        return self._replica.is_done

    def between_steps(self, are_groups_whole: bool = True) -> dict[str, float | None]:
        """Run what the program does between the step just applied and the next; returns what it
        reports of that step."""
        check = self._interruption.check if are_groups_whole else None
        with self._interruption.abandonable():
            return dict(self._replica.between_steps(check))

    def apply(self, vote: Vote) -> StepRecord:
        """Apply the decided step. Raises `StepMismatch` if it is not the next one, `TornApply` if
        the apply breaks half-way."""
        if vote.step != self.committed_step + 1:
            raise StepMismatch(
                f"the vote decides step {vote.step}, but this worker is at step "
                f"{self.committed_step}"
            )
        with self.timer.part("snapshot_s"):
            self._snapshots.await_copied()
            self._writer.await_copied()
        try:
            with self.timer.part("compute_s"):
                applied = self._replica.apply(vote.step, vote)
        except BaseException as error:
            self.torn = True
            raise TornApply(f"the apply of step {vote.step} broke: {error}") from error
        self.committed_step = vote.step
        self.gradients_complete = False
        tokens = int(vote.num_tokens)
        record = StepRecord(
            time=time.time(),
            step=vote.step,
            generation=self._groups.assignment.generation,
            world_size=self._groups.assignment.layout.num_workers,
            loss=None if applied.skipped else finite(vote.loss_sum / tokens),
            tokens=tokens,
            lr=finite(applied.lr),
            grad_norm=finite(applied.grad_norm),
            step_s=time.perf_counter() - self._began,
            skipped=applied.skipped,
            **self.timer.split(),
        )
        self._records.append(record)
        return record

    def drop_gradients(self) -> None:
        self.gradients_complete = False
        self._replica.drop_gradients()

    def _cast(
        self, step: int, sums: Sequence[float], device: torch.device
    ) -> tuple[torch.Tensor, Work]:
        """Begin to cast this rank's vote: one all-reduce, which the host reads before any apply."""
        loss_sum, num_tokens, sq_grad_norm = sums
        world_rank = self._groups.world_rank
        num_workers = self._groups.assignment.layout.num_workers
        ballot = Ballot(
            step,
            world_rank,
            (loss_sum, num_tokens, sq_grad_norm),
            wants_pause=self._interruption.is_pause_requested,
            snapshot_order=self._snapshots.whole_order,
            wants_save=self._interruption.is_save_requested_by_vote(self._writer.begun_step),
            is_writing=self._writer.is_busy,
            compute_s=tuple(self._compute_times.ballot(step, world_rank, num_workers)),
        )
        numbers = torch.tensor(pack_vote(ballot), dtype=torch.float64, device=device)
        self.gradients_complete = True
        return numbers, self._groups.world.allreduce([numbers])

    def _read(self, step: int, numbers: torch.Tensor) -> Vote:
        """The vote on a step. An aborted collective completes, too, but with garbage: then this
        raises `BrokenVote`."""
        self._faults.at("reading", step)
        num_workers = self._groups.assignment.layout.num_workers
        tally = unpack_vote(numbers.tolist(), step, num_workers)
        self.compute_s = tally.compute_s
        self._snapshots.note_vote(tally.vote.num_snapshots, tally.vote.num_contributions)
        return tally.vote


def quiesced(
    worker: str,
    generation: int,
    stepper: Stepper | None,
    held_step: int,
    records: tuple[StepRecord, ...],
    saving_step: int,
) -> Quiesced:
    """The report of a worker that has unwound; `held_step` is its step if it was not training."""
    if stepper is None:
        return Quiesced(worker, generation, held_step, records=records, saving_step=saving_step)
    return Quiesced(
        worker,
        generation,
        stepper.committed_step,
        stepper.vote,
        stepper.gradients_complete,
        stepper.torn,
        records,
        saving_step,
    )
