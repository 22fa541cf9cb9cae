"""A synthetic run of months: the real core and the real journal writer, and a crew that obeys.

Four workers train one step a second. One is lost every twelve hours, is replaced, and comes back in
by a growth; a checkpoint is due every 900 steps, and an evaluation every 500.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

from elastic.commands import (
    Abort,
    Command,
    DropCheckpoints,
    Form,
    Pause,
    PublishCheckpoint,
    RecordStep,
    Relayout,
    StartStore,
    StartWorkers,
)
from elastic.controller_events import CheckpointsRemoved
from elastic.core import Core
from elastic.events import (
    Checkpointed,
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
from elastic.journalling import JournalWriter
from elastic.phases import Running
from elastic.planning import Job, Wish
from elastic.policy import Policy
from elastic.votes import StepRecord, Vote

NUM_WORKERS, PART_BYTES = 4, 16
BEGAN = 1.8e9
POLICY = Policy(NUM_WORKERS - 1, NUM_WORKERS, keep_last=3, keep_best=1, growth_settle_s=0.0)
WISH = Wish.parse("dp=4", NUM_WORKERS)


@dataclass(frozen=True)
class Every:
    """In steps: how often what happens."""

    loss: int = 43_200
    evaluation: int = 500
    checkpoint: int = 900


def opening(num_steps: int, policy: Policy = POLICY, every: Every = Every()) -> RunOpened:
    job = Job(num_microbatches=8, steps=num_steps, checkpoint_every=every.checkpoint)
    return RunOpened(1, policy, WISH, job)


def step_of(step: int, generation: int, now: float) -> StepCommitted:
    """Numbers as long as real ones."""
    noise = (step * 7919 % 1000) / 997
    loss = 2.0 + noise / 3 + 1 / step
    norm = 1.0 + noise
    record = StepRecord(now, step, generation, NUM_WORKERS, loss, 4096, 3e-4, norm, 0.99, False)
    return StepCommitted(generation, record, Vote(step, loss * 4096, 4096, norm, NUM_WORKERS))


def reports_after(
    committed: StepCommitted, members: Iterable[str], every: Every
) -> Iterator[Event]:
    """What else is reported of a step: its held-out loss, and its checkpoint's parts."""
    generation, step = committed.generation, committed.record.step
    if step % every.evaluation == 0:
        yield Evaluated(generation, step, committed.record.loss or 0.0)
    if step % every.checkpoint == 0:
        for worker in members:
            file = PartFile(f"part-{worker}.safetensors", PART_BYTES, 1)
            yield PartWritten(worker, generation, step, file)


def answers_to(command: Command, committed_step: int) -> Iterator[Event]:
    """What a healthy crew reports."""
    match command:
        case StartStore():
            yield StoreReady("10.0.0.1", 20000)
        case StartWorkers():
            for worker in command.workers:
                yield WorkerReady(worker, f"node-{worker[1:]}", 1000)
        case Form():
            for worker in command.plan.participants:
                yield GroupFormed(worker, command.generation)
        case Relayout():
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
    """Writes `journal.jsonl` and `metrics.jsonl` of a run that goes on."""

    def __init__(
        self,
        folder: Path,
        num_steps: int,
        step_s: float = 1.0,
        policy: Policy = POLICY,
        every: Every = Every(),
    ) -> None:
        self.core, self.writer = Core(), JournalWriter()
        self.now = BEGAN
        self.num_events = 0
        self._inbox: deque[Event] = deque([opening(2 * num_steps, policy, every)])
        self._num_steps = num_steps
        self._step_s = step_s
        self._every = every
        folder.mkdir(parents=True)
        self._journal: BufferedWriter = open(folder / "journal.jsonl", "wb")  # noqa: SIM115
        self._metrics: BufferedWriter = open(folder / "metrics.jsonl", "wb")  # noqa: SIM115

    def write(self) -> None:
        """All of it; the steps are then committed, and the run goes on."""
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
        step = state.committed_step + 1
        event = step_of(step, state.generation, self.now)
        self._inbox.extend(reports_after(event, state.members(), self._every))
        if step % self._every.loss == 0:
            self._inbox.append(WorkerLost(state.members()[0], "killed by signal 9"))
        return event

    def _serve(self, event: Event) -> None:
        """As `actors/shell.py` does it."""
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
                self._inbox.extend(answers_to(command, core.state.committed_step))
        self._write(writer.due(self.now, core.state))

    def _write(self, lines: list[dict[str, object]]) -> None:
        for line in lines:
            self._journal.write(json.dumps(line).encode() + b"\n")
