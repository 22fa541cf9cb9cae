"""A synthetic run of months: the real core, the real journal writer, and simulated workers.

Four workers, or a thousand, train one step per second under the default policy. Every twelve hours
a worker is lost and its replacement joins by a growth. An evaluation is due every 500 steps, and
a checkpoint when the policy requests one.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import (
    Abort,
    Command,
    DropCheckpoints,
    Form,
    Pause,
    PublishCheckpoint,
    RecordStep,
    RequestCheckpoint,
    Reshard,
    StartStore,
    StartWorkers,
)
from elastic.protocol.controller_events import CheckpointsRemoved
from elastic.protocol.events import (
    Checkpointed,
    ComputeTimed,
    Evaluated,
    Event,
    GroupFormed,
    PartFile,
    PartWritten,
    Paused,
    Quiesced,
    RunOpened,
    StateReady,
    StepCommitted,
    StoreReady,
    Woke,
    WorkerLost,
    WorkerReady,
)
from elastic.protocol.phases import Running
from elastic.protocol.policy import Policy
from elastic.protocol.votes import StepRecord, Vote
from elastic.replay.journal_lines import JournalWriter
from pipelines.run.options import policy_of
from pipelines.settings import TrainSettings

NUM_WORKERS, NUM_MANY_WORKERS, PART_BYTES = 4, 1000, 16
BEGAN = 1.8e9
SAVING_S = 1.0
"""The extra time of a step during which a checkpoint is written."""


def long_run_policy(num_workers: int) -> Policy:
    return policy_of(TrainSettings(), num_workers - 1, num_workers, "long")


POLICY = long_run_policy(NUM_WORKERS)


@dataclass(frozen=True)
class Every:
    """The interval of each event, in steps."""

    loss: int = 43_200
    evaluation: int = 500
    checkpoint: int = 0
    """0: only when the policy requests one."""


def opening(num_steps: int, policy: Policy = POLICY, every: Every = Every()) -> RunOpened:
    num_workers = policy.max_workers
    job = Job(2 * num_workers, steps=num_steps, checkpoint_every=every.checkpoint)
    return RunOpened(1, policy, TargetLayout.parse(f"dp={num_workers}", num_workers), job)


def noise_of(number: int) -> float:
    """A value from 0 to 1 with as many digits as a measured number."""
    return (number * 7919 % 1000) / 997


def step_of(
    step: int,
    generation: int,
    now: float,
    num_workers: int = NUM_WORKERS,
    wants_save: bool = False,
    is_writing: bool = False,
) -> StepCommitted:
    """A committed step whose numbers have as many digits as real ones."""
    loss = 2.0 + noise_of(step) / 3 + 1 / step
    norm = 1.0 + noise_of(step)
    step_s = 0.99 + SAVING_S * is_writing
    record = StepRecord(now, step, generation, num_workers, loss, 4096, 3e-4, norm, step_s, False)
    flags = {
        "num_save_requests": num_workers * wants_save,
        "num_writing": num_workers * is_writing,
    }
    vote = Vote(step, loss * 4096, 4096, norm, num_workers, **flags)
    return StepCommitted(generation, record, vote)


def reports_after(
    committed: StepCommitted, num_members: int, every: Every, slow_rank: int | None = None
) -> Iterator[Event]:
    """The other reports of world rank 0 on a step: held-out loss and compute times."""
    generation, step = committed.generation, committed.record.step
    if step % POLICY.straggler_every == 0:
        times = [0.9 + noise_of(step + world_rank) / 9 for world_rank in range(num_members)]
        if slow_rank is not None:
            times[slow_rank] *= 3
        yield ComputeTimed(generation, step, tuple(times))
    if step % every.evaluation == 0:
        yield Evaluated(generation, step, committed.record.loss or 0.0)


def parts_of(committed: StepCommitted, members: Iterable[str]) -> Iterator[PartWritten]:
    """The parts of the checkpoint of this step."""
    for worker in members:
        file = PartFile(f"part-{worker}.safetensors", PART_BYTES, 1)
        yield PartWritten(worker, committed.generation, committed.record.step, file)


def answers_to(command: Command, committed_step: int) -> Iterator[Event]:
    """The reports of healthy workers."""
    match command:
        case StartStore():
            yield StoreReady("10.0.0.1", 20000)
        case StartWorkers():
            for worker in command.workers:
                yield WorkerReady(worker, f"node-{worker[1:]}", 1000)
        case Form():
            for worker in command.plan.participants:
                yield GroupFormed(worker, command.generation)
        case Reshard():
            for worker in command.workers:
                yield StateReady(worker, command.generation, 0, 0, 0.1, 1 << 20, 1 << 20, 1 << 21)
        case Pause():
            for worker in command.workers:
                yield Paused(worker, command.generation, committed_step)
        case Abort():
            for worker in command.workers:
                yield Quiesced(worker, command.generation, committed_step)
        case PublishCheckpoint():
            path = f"checkpoints/step-{command.step:08d}-g{command.generation}"
            yield Checkpointed(command.step, command.generation, path)
        case DropCheckpoints():
            yield CheckpointsRemoved(command.dropped)


class LongRun:
    """Writes `journal.jsonl` and `metrics.jsonl` of a run that has not ended."""

    def __init__(
        self,
        folder: Path,
        num_steps: int,
        step_s: float = 1.0,
        policy: Policy = POLICY,
        every: Every = Every(),
        slow_rank: int | None = None,
    ) -> None:
        """`slow_rank` is a straggler all the time, and no standby worker can replace it."""
        self.core, self.writer = Core(), JournalWriter()
        self.now = BEGAN
        self.num_events = 0
        self._inbox: deque[Event] = deque([opening(2 * num_steps, policy, every)])
        self._num_steps = num_steps
        self._step_s = step_s
        self._every = every
        self._slow_rank = slow_rank
        self._wants_save = False
        self._unwritten: tuple[Event, ...] = ()
        """The parts of a checkpoint, which are complete when the next step has committed."""
        folder.mkdir(parents=True)
        self._journal: BufferedWriter = open(folder / "journal.jsonl", "wb")  # noqa: SIM115
        self._metrics: BufferedWriter = open(folder / "metrics.jsonl", "wb")  # noqa: SIM115

    def write(self) -> None:
        """Write until all steps are committed; the run does not end."""
        while self.core.state.committed_step < self._num_steps:
            self._serve(self._next_event())
        self._journal.close()
        self._metrics.close()

    def _next_event(self) -> Event:
        if self._inbox:
            self.now += 0.001
            return self._inbox.popleft()
        state = self.core.state
        if not isinstance(state.phase, Running):
            self.now = max(self.now, self.core.next_deadline() or self.now)
            return Woke()
        self.now += self._step_s
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.now:
            return Woke()
        step, members = state.committed_step + 1, state.live.members()
        is_writing = bool(self._unwritten)
        step_fields = (step, state.generation, self.now, len(members), self._wants_save, is_writing)
        event = step_of(*step_fields)
        self._inbox.extend(self._unwritten)
        self._inbox.extend(reports_after(event, len(members), self._every, self._slow_rank))
        self._unwritten = ()
        if event.vote.saves(self._every.checkpoint):
            self._unwritten, self._wants_save = tuple(parts_of(event, members)), False
        if step % self._every.loss == 0:
            self._inbox.append(WorkerLost(members[0], "killed by signal 9"))
        return event

    def _serve(self, event: Event) -> None:
        """Handle an event as `actors/controller/shell.py` does."""
        self.num_events += 1
        core, writer = self.core, self.writer
        lines = writer.before(event, core.state)
        commands = core.step(self.now, event)
        lines += writer.after(self.now, event, commands, core.state)
        self._write(lines)
        for command in commands:
            if isinstance(command, RecordStep):
                row = json.dumps(dataclasses.asdict(command.record))
                self._metrics.write(row.encode() + b"\n")
            else:
                self._wants_save |= isinstance(command, RequestCheckpoint)
                self._inbox.extend(answers_to(command, core.state.committed_step))
        self._write(writer.due(self.now, core.state))

    def _write(self, lines: list[dict[str, object]]) -> None:
        for line in lines:
            self._journal.write(json.dumps(line).encode() + b"\n")
