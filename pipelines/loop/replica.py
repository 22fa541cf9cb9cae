"""The replica of a custom training loop: one rank's part of the module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from actors.distributed.torch_private import copy_tensors, scale_tensors
from actors.runtime.program import Applied, Evaluation, Groups, Interrupt
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.votes import Vote
from pipelines.loop.loop import Loop
from pipelines.loop.passes import LoopPasses
from pipelines.loop.reports import ReportSums, means_of_all
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.step import Position
from pipelines.loop.thread import Request
from pipelines.loop.whole_weights import (
    broadcast,
    empty,
    gather_whole,
    share,
    sum_over_workers,
    write_regions,
)
from pipelines.settings import TrainSettings
from pipelines.training.custom.modules.custom_module import seeded
from pipelines.training.passes.pass_size import PassObservations
from pipelines.training.passes.passes import Passes
from pipelines.training.passes.running_buffers import RunningBuffers
from pipelines.training.passes.stage_buffers import StageBuffers
from pipelines.training.passes.stage_modules import Stage
from pipelines.training.replica.replica import ShardedReplica
from pipelines.training.workload.state import SCRIPT, state_specs
from pipelines.training.workload.workload import Workload

POLL_S = 1.0
"""How often a worker whose script runs long says so to those that wait for it."""
ABSENT, BUSY, AT_BODY, BEHIND = 0, *range(len(Request) + 1, len(Request) + 4)
"""Where a script is, besides the values of `Request`: not in the present step, running, at the
body of the next, behind its loop."""
NUM_PLACES = BEHIND + 1


class LoopReplica(ShardedReplica):
    """A replica whose training passes the script drives; see `actors.runtime.program.Replica`.

    Between two steps the script runs up to its next body. What it requests there, all workers
    provide together: see `_serve`.
    """

    def __init__(
        self,
        workload: Workload,
        settings: TrainSettings,
        groups: Groups,
        observations: PassObservations | None = None,
        *,
        loop: Loop,
    ) -> None:
        self.loop = loop
        loop.device = groups.device
        super().__init__(workload, settings, groups, observations)
        self._is_alone = groups.assignment.generation == 0
        """Whether this is a warm-up."""
        self._committed: int | None = None
        """The step whose state this replica has; None: it has not resumed yet."""
        self._is_done = False
        self._first = 0
        """The world rank of the first worker."""
        self._report_sums = ReportSums()

    def _pipeline_passes(self, stages: Sequence[Stage], moving: StageBuffers) -> Passes:
        raise LoopMisused("pp: a custom training loop cannot run as a pipeline; set pp=1")

    def _passes(self, moving: RunningBuffers) -> Passes:
        return LoopPasses(
            self.workload, self.sharded, self.parallel, moving, self.pass_size, self.loop
        )

    def read_early(self) -> None:
        """Nothing is read early: the script's own code, which runs until its next pass, may use the
        random generators that reading seeds."""

    def evaluate(self, step: int, interrupt: Interrupt) -> Evaluation:
        if not self._is_alone and self._place() == ABSENT:
            self._restore_script()  # it has left the loop on other workers, or waits below it
        return super().evaluate(step, interrupt)

    def resume(self, committed_step: int, interrupt: Interrupt) -> None:
        """Bring all scripts to the body of the next step, or learn that they have left the loop.

        First those arrive that were on their way when the generation before broke.
        """
        loop, step = self.loop, committed_step + 1
        self._committed = committed_step
        loop.reporting = None  # the step before is recorded already
        is_stuck = loop.is_busy and loop.is_in_body  # in a collective of a generation before
        if is_stuck or loop.number not in (0, step):
            loop.restart_script(at=step)
        self._choose_first(step, interrupt)
        self._serve(interrupt)
        loop.state.forget_step()
        self._share_values(step, interrupt)
        self._share_changes(interrupt)
        if self._is_done:
            return
        if committed_step < self.settings.steps:
            loop.begin(step, self._position(step), self._script_state)
        else:  # the scripts of the session before have failed behind their loop
            loop.begin_behind(committed_step, self._script_state)
        self._serve(interrupt)

    def _choose_first(self, step: int, interrupt: Interrupt) -> None:
        """The first worker is the one whose script has run for longest: its variables, such as
        running means that it prints, have seen the most steps."""
        begun = [0.0] * self.groups.layout.num_workers
        begun[self.groups.world_rank] = self.loop.begun_at or step
        counted = sum_over_workers(begun, self.groups)
        interrupt()
        self._first = counted.index(min(counted))
        self.loop.is_first_worker = self._first == self.groups.world_rank and not self._is_alone

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> Tensor:
        if self._committed is None:
            self.resume(step - 1, interrupt)
        self.loop.declaration.source.refuse_other_length()
        self.loop.declaration.states.begin_step()
        return super().compute(step, interrupt, skipped_batches)

    def _feed_round(self, step: int, microbatches: Sequence[int]) -> Any:
        number = microbatches[0] if microbatches else None
        states, dtype = self.loop.declaration.states, getattr(torch, self.settings.dtype)
        states.begin_microbatch(number, dtype, self.groups.device)
        return super()._feed_round(step, microbatches)

    def prepare_gradients(self) -> None:
        script = self.loop.declaration.optimizer_factory
        if not script.all_step:
            self.sharded.drop_gradients(lambda name: not script.is_stepped(name))
        if (used := self.loop.values.scaler.used) != 1.0:
            scale_tensors(list(self.state.gradients().values()), 1 / used)
        states = self.loop.declaration.states
        states.end_step()
        states.gather(self.groups, self.parallel.counts_loss, self.interrupt_hooks.interrupt)

    def apply(self, step: int, vote: Vote) -> Applied:
        applied = super().apply(step, vote)
        self.loop.values.scaler.update(applied.skipped)
        if not applied.skipped:  # numbers that are not finite would stay for ever
            self.loop.declaration.states.commit()
        self._committed = step
        if not self._is_alone:
            loss = vote.loss_sum / vote.num_tokens if vote.num_tokens else math.nan
            loss = math.nan if applied.skipped else loss
            is_last, norm = step >= self.settings.steps, applied.grad_norm
            self.loop.commit(step, self._position(step + 1), is_last, loss, norm)
        return applied

    @property
    def is_done(self) -> bool:
        """Whether the scripts have left the loop after the present step."""
        return self._is_done

    def between_steps(self, interrupt: Interrupt | None) -> Mapping[str, float | None]:
        """Let the script run up to its next body; None for `interrupt`: the groups are broken, so
        that it is served in the next generation."""
        if interrupt is None:
            self._await_script()
        else:
            try:
                self._serve(interrupt)
            except Exception:
                if not self.loop.has_failed and self._place() in (AT_BODY, BEHIND):
                    self._keep_values()  # the script of another worker has failed
                raise
            self._replace(self.loop.called.at.values.kept)
        self._keep_values()
        return self._report_sums.means()

    def finish(self, interrupt: Interrupt) -> None:
        """Let the script of the first worker, or of another one behind its loop, run to its end,
        unless one has begun to."""
        if not self._is_done:
            return
        rank, size = self.groups.world_rank, self.groups.layout.num_workers
        is_waiting = self._place() == BEHIND
        waiting_or_begun = [0] * (2 * size)
        waiting_or_begun[rank], waiting_or_begun[size + rank] = is_waiting, self.loop.has_proceeded
        counted = sum_over_workers(waiting_or_begun, self.groups)
        interrupt()
        chosen = self._first if counted[self._first] else counted.index(1.0)
        if not any(counted[size:]) and chosen == rank:
            self.loop.proceed()
        self._serve(interrupt)

    def _serve(self, interrupt: Interrupt) -> None:
        """Provide together what scripts request until all wait at their next body or behind their
        loop. Raises `LoopMisused` if some wait here and some there."""
        loop = self.loop
        while True:
            self._await_script()
            interrupt()
            numbers, is_shared = self._exchange_places(interrupt)
            wanted = next((kind for kind in Request if numbers[kind.value]), None)
            if wanted is Request.EVALUATION and numbers[BUSY]:
                continue  # what it evaluates may be what the scripts are changing
            if wanted is Request.EVALUATION and numbers[ABSENT]:
                self._share_live(interrupt)
            if wanted is not None:
                is_mine = loop.request is wanted
                answer = self._provide(wanted, interrupt, keeps=is_mine)
                interrupt()
                if is_mine:
                    loop.answer(answer)
            elif not numbers[BUSY]:
                break
        if numbers[BEHIND] and numbers[AT_BODY]:
            raise LoopMisused(
                f"step {(self._committed or 0) + 1}: some workers have left the loop and others "
                "not: decide by what is the same on all workers, such as run.evaluate(), not by "
                "the loss of this worker's microbatches"
            )
        self._is_done = bool(numbers[BEHIND])
        num_workers = self.groups.layout.num_workers
        if num_workers in (numbers[AT_BODY], numbers[BEHIND]) and not is_shared:
            raise LoopMisused(
                f"step {(self._committed or 0) + 1}: the scripts of the workers have different "
                "learning rates, schedules or kept objects, have changed their models differently, "
                "or have stepped different optimizers: decide these by what is the same on all "
                "workers, such as step.number, step.loss or run.evaluate(), not by the loss of "
                "this worker's microbatches, and pass variables that decide them to run.keep: a "
                "worker that joins has their first values"
            )

    def _await_script(self) -> None:
        """Wait for the script. If it fails behind a step, the numbers that it has changed until
        then belong to that step. Changes of its models do not: other workers may not have come
        there, and each writes its own shards."""
        try:
            self.loop.await_arrival(POLL_S)
        except Exception:
            behind = self.loop.called.at.behind
            if behind is not None and behind.committed:
                self._take_values(self.loop.state.live())
            raise

    def _exchange_places(self, interrupt: Interrupt) -> tuple[list[int], bool]:
        """The number of workers at each place, and whether the scripts have the same state, if all
        are at the body. With it all workers sum what the scripts that have arrived have reported of
        the step before."""
        reports, place = self._report_sums, self._place()
        reporting = self.loop.reporting if place in (AT_BODY, BEHIND) else None
        own = {} if reporting is None else reporting.own_reports.totals()
        places = [0.0] * NUM_PLACES
        places[place] = 1.0
        lacks = reports.lacks(own)
        state = self.loop.state
        has_arrived = place in (AT_BODY, BEHIND)
        own_fingerprint = state.fingerprint if has_arrived else [0.0] * len(state.fingerprint)
        packed = reports.packed({} if lacks else own)
        numbers = sum_over_workers([*places, float(lacks), *own_fingerprint, *packed], self.groups)
        interrupt()  # an aborted reduction may have returned garbage
        if reporting is not None and not lacks:
            self.loop.reporting = None
        fingerprints_end = NUM_PLACES + 1 + len(own_fingerprint)
        reports.add(numbers[fingerprints_end:])
        if numbers[NUM_PLACES]:
            reports.agree(own, self.groups, interrupt)
            return self._exchange_places(interrupt)
        counts = [round(number) for number in numbers[:NUM_PLACES]]
        totals = numbers[NUM_PLACES + 1 : fingerprints_end]
        return counts, state.is_shared(totals, self.groups.layout.num_workers)

    def _place(self) -> int:
        """Where this worker's script waits."""
        loop = self.loop
        if loop.is_busy:
            return BUSY
        if loop.request is not None:
            return loop.request.value
        if loop.left_after is not None and loop.left_after == self._committed:
            return BEHIND
        return AT_BODY if loop.is_at(self._committed) else ABSENT

    def _share_values(self, step: int, interrupt: Interrupt) -> None:
        """Take the numbers of a worker whose script has begun this step.

        They are newer than those of the state, if a failure came while the script ran to its body.
        """
        self._share(self.loop.number == step, self.loop.state.kept, interrupt)

    def _share_live(self, interrupt: Interrupt) -> None:
        """Give the scripts that are not in this step what the others have by now, such as averaged
        weights, for an evaluation."""
        is_absent = self._place() == ABSENT
        self._share(not is_absent, self.loop.state.live, interrupt)
        if is_absent:
            self._restore_script()

    def _share(
        self, has_values: bool, values: Callable[[], Mapping[str, Tensor]], interrupt: Interrupt
    ) -> None:
        """Take the script's values of the first worker that has them, if one has."""
        having = [0] * self.groups.layout.num_workers
        having[self.groups.world_rank] = int(has_values)
        counted = sum_over_workers(having, self.groups)
        interrupt()
        if any(counted):
            first = counted.index(1.0)
            if first == self.groups.world_rank:
                self._take_values(values())
            for value in self.state.script.values():
                received = value.clone()
                broadcast(received, first, self.groups)
                interrupt()
                value.copy_(received)

    def _share_changes(self, interrupt: Interrupt) -> None:
        """Take what a script has changed in its models since the latest step, on all workers alike,
        from the first worker that has it."""
        changed = self.loop.called.at.values.kept
        self._replace(share(self._weights, changed, self.groups, interrupt))

    @contextmanager
    def _changed_models(self, interrupt: Interrupt) -> Iterator[None]:
        """With what the script has changed in its models behind the step: it may undo that, as with
        averaged weights that it evaluates."""
        own = self.loop.called.at.values.kept
        changed = share(self._weights, own, self.groups, interrupt)
        before = {n: v.clone() for n, v in self.state.tensors().items() if n in changed}
        self._replace(changed)
        try:
            yield
        finally:
            if before:
                held = self.state.tensors()
                with torch.no_grad():
                    copy_tensors([held[name] for name in before], [*before.values()])
                self.sharded.after_step()

    def _replace(self, values: Mapping[str, Tensor]) -> None:
        """Replace this rank's regions by those of the whole tensors with these names."""
        if values:
            write_regions(self._weights, values, self.state.tensors(), self.groups)
            self.sharded.after_step()

    def _restore_script(self) -> None:
        self.loop.state.load(self._script_state())
        self.loop.state.restore()

    def _script_state(self) -> dict[str, Tensor]:
        """The script's part of the state."""
        return {name.removeprefix(SCRIPT): value for name, value in self.state.script.items()}

    def _keep_values(self) -> None:
        self._take_values(self.loop.state.kept())

    def _take_values(self, values: Mapping[str, Tensor]) -> None:
        for name, value in self._script_state().items():
            value.copy_(values[name])

    def _provide(self, wanted: Request, interrupt: Interrupt, keeps: bool) -> Any:
        if wanted is Request.EVALUATION:
            # Seeded, so that the script draws on as if it had not evaluated.
            with self._changed_models(interrupt), seeded(self.settings.seed):
                return self.evaluate(self.settings.steps, interrupt)
        if wanted is Request.REPORTS:
            latest = self.loop.latest
            own = {} if latest is None else latest.own_reports.totals()
            return means_of_all(own, self.groups, interrupt)
        specs, into = self._weights, self.loop.called.at.values.tensors() if keeps else {}
        if wanted is Request.OPTIMIZER:
            specs = [spec for spec in self._specs if spec.kind == "optimizer"]
            into = {spec.name: empty(spec, torch.device("cpu")) for spec in specs if keeps}
        gather_whole(specs, self.state.tensors(), self.groups, interrupt, into)
        return into

    @cached_property
    def _specs(self) -> tuple[TensorSpec, ...]:
        return state_specs(self.workload, self.settings)

    @cached_property
    def _weights(self) -> list[TensorSpec]:
        return [spec for spec in self._specs if spec.kind in ("parameter", "buffer")]

    def _position(self, step: int) -> Position:
        epoch_size = self.loop.declaration.source.epoch_size
        num_batches, update = divmod(step - 1, self.settings.updates_per_batch)
        epoch = num_batches * self.settings.batch // epoch_size if epoch_size else 0
        return Position(epoch, update)
