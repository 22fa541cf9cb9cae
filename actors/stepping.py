"""A step commits everywhere or nowhere: compute, vote, apply."""

from __future__ import annotations

import math
import time
from collections import deque

import torch

from actors.errors import TornApply
from actors.faults import Faults
from actors.interruption import Interruption
from actors.own_time import OwnTimes
from actors.part_writer import PartWriter
from actors.program import Groups, Replica
from actors.snapshots import Snapshots
from actors.standstill import wait_for
from elastic.parity import num_whole
from elastic.votes import StepRecord, Vote

NUM_KEPT_RECORDS = 64


class Stepper:
    """One rank's steps in one generation.

    What an abort needs to know stands here: `committed_step`, the latest `vote` read,
    whether `gradients_complete` for the step after, whether `torn`.
    """

    def __init__(
        self,
        groups: Groups,
        replica: Replica,
        committed_step: int,
        interruption: Interruption,
        faults: Faults,
        snapshots: Snapshots,
        writer: PartWriter,
        own_times: OwnTimes,
    ) -> None:
        self.left_out: tuple[int, ...] = ()
        """The numbers of the batches that no step reads."""
        self._snapshots = snapshots
        self._writer = writer
        self._own_times = own_times
        self.compute_s: tuple[float, ...] = ()
        """Of all ranks, as the latest step's vote told, if it did."""
        self._groups = groups
        self._replica = replica
        self._interruption = interruption
        self._faults = faults
        self._began = time.perf_counter()
        self.committed_step = committed_step
        self.vote: Vote | None = None
        self.gradients_complete = False
        self.torn = False
        self.records: deque[StepRecord] = deque(maxlen=NUM_KEPT_RECORDS)

    def step(self) -> tuple[StepRecord, Vote]:
        """Train one step; raises if the generation is aborted or a peer is gone."""
        self._began = time.perf_counter()
        step = self.committed_step + 1
        self._own_times.begin()
        with self._interruption.leavable():
            self._faults.flip_a_bit(step, self._replica.tensors)
            self._faults.at("compute", step)
            sums = self._replica.compute(step, self._interruption.check, self.left_out)
            self._faults.poison(step, sums)
            self._faults.slow_down(step, sums.device, self._interruption.check)
            self._snapshots.await_whole(self._interruption.check)
            self._faults.at("vote", step)
            vote = self._cast(step, sums)
        self.vote = vote
        self._faults.at("apply", step)
        record = self.apply(vote)
        self._own_times.end(step)
        return record, vote

    def apply(self, vote: Vote) -> StepRecord:
        """Take the decided step. Raises `TornApply` if it breaks half-way."""
        self._snapshots.await_copied()
        self._writer.await_copied()
        try:
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
            loss=None if applied.skipped else vote.loss_sum / tokens,
            tokens=tokens,
            lr=applied.lr,
            grad_norm=applied.grad_norm,
            step_s=time.perf_counter() - self._began,
            skipped=applied.skipped,
        )
        self.records.append(record)
        return record

    def drop_gradients(self) -> None:
        self.gradients_complete = False
        self._replica.drop_gradients()

    def _cast(self, step: int, sums: torch.Tensor) -> Vote:
        """The one collective of a step that decides it; read on the host before any apply.

        Its contribution count must equal the world size: an aborted collective completes too,
        with garbage.
        """
        finite = torch.isfinite(sums)
        whole = finite.all()
        told = (
            self._interruption.pause_is_wished,
            self._snapshots.ballot,
            self._interruption.save_is_wished(self._writer.begun_step),
            self._writer.is_busy,
        )
        world_rank = self._groups.world_rank
        num_workers = self._groups.assignment.layout.num_workers
        times = self._own_times.ballot(step, world_rank, num_workers)
        extra = [1.0, 0.0, *map(float, told), *times]
        ballot = torch.cat(
            [torch.where(finite, sums, 0.0), torch.tensor(extra, dtype=torch.float64).to(sums)]
        )
        ballot[4] = 1.0 - whole.to(ballot)
        self.gradients_complete = True
        wait_for(self._groups.world.allreduce([ballot]))
        self._faults.at("reading", step)
        read = ballot.tolist()
        self.compute_s = tuple(read[len(read) - len(times) :])
        loss_sum, num_tokens, sq_grad_norm, *counts = read[: len(read) - len(times)]
        if not all(map(math.isfinite, (num_tokens, *counts))) or round(counts[0]) != num_workers:
            raise RuntimeError(f"gloo/nccl: the vote of step {step} came back broken")
        if num_tokens != round(num_tokens):
            raise ValueError(
                f"step {step}: the numbers of losses sum to {num_tokens}: give whole ones, as of "
                "tokens, and weigh the losses themselves"
            )
        num_contributions, num_nonfinite, num_wishes, kept, *of_saving = map(round, counts)
        num_kept = num_whole(kept)
        self._snapshots.note_vote(num_kept, num_contributions)
        if not (math.isfinite(loss_sum) and math.isfinite(sq_grad_norm)):
            # What each rank added was finite: it is the sum that overflows, the same on all.
            loss_sum, sq_grad_norm, num_nonfinite = 0.0, 0.0, num_contributions
        return Vote(
            step=step,
            loss_sum=loss_sum,
            num_tokens=round(num_tokens),
            sq_grad_norm=sq_grad_norm,
            num_contributions=num_contributions,
            num_nonfinite=num_nonfinite,
            num_pause_wishes=num_wishes,
            num_snapshots=num_kept,
            num_save_wishes=of_saving[0],
            num_writing=of_saving[1],
        )
