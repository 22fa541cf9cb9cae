"""Poison-batch detection names samples by their index in the data, and no step is lost."""

from __future__ import annotations

import pytest
from test_hangs import SteppedCore

from elastic.geometry.sample_order import batch_ids, sample_of
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, Resume
from elastic.protocol.events import (
    Checkpointed,
    Evaluated,
    GroupFormed,
    PartFile,
    PartWritten,
    Quiesced,
    StateReady,
    StepCommitted,
    WorkerLost,
    WorkerReady,
)
from elastic.protocol.phases import Aborting, Forming, Resharding, Running, Waiting
from elastic.protocol.votes import StepRecord, Vote

JOB = Job(
    num_microbatches=4,
    microbatch=2,
    steps=1000,
    seed=7,
    num_samples=1000,
    eval_every=5,
    num_eval_samples=5,
)


class PoisonedRun(SteppedCore):
    """Workers that obey and may be lost to one microbatch."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers, job=JOB)
        self.resumes: list[Resume] = []

    def run_until_training(self) -> None:
        """Answer the core until workers train or the run has ended."""
        for _ in range(40):
            state, phase = self.core.state, self.core.state.phase
            generation, step = state.generation, state.committed_step
            starting = sorted(state.membership.records.keys() - state.membership.warm)
            match phase:
                case Running():
                    return
                case Forming():
                    self.deliver_all(*(GroupFormed(w, generation) for w in sorted(phase.pending)))
                case Resharding():
                    workers = sorted(phase.pending)
                    self.deliver_all(
                        *(StateReady(w, generation, 0, 0, 0.0, 1, 1, 2) for w in workers)
                    )
                case Aborting():
                    vote = Vote(step, 1.0, 8, 1.0, len(state.live.members())) if step else None
                    workers = sorted(phase.pending)
                    self.deliver_all(*(Quiesced(w, generation, step, vote) for w in workers))
                case Waiting() if starting:
                    self.deliver_all(*(WorkerReady(worker, "node", 1) for worker in starting))
                case _ if state.checkpoints.uploads:
                    self.write_parts()
                case _ if self.core.next_deadline() is None:
                    return
                case _:
                    self.wake()

    def deliver_all(self, *events: object) -> None:
        commands: list[Command] = self.deliver(*events)  # type: ignore[arg-type]
        self.resumes += [command for command in commands if isinstance(command, Resume)]

    def write_parts(self) -> None:
        """Write the parts of all current uploads and publish their checkpoints."""
        for upload in list(self.core.state.checkpoints.uploads.values()):
            position = (upload.generation, upload.step)
            files = [PartWritten(w, *position, PartFile(w, 1, 1)) for w in sorted(upload.pending)]
            path = f"step-{upload.step}-g{upload.generation}"
            self.deliver_all(*files, Checkpointed(upload.step, upload.generation, path))

    def train_to(self, step: int) -> None:
        state = self.core.state
        while state.committed_step < step:
            number, num = state.committed_step + 1, len(state.live.members())
            record = StepRecord(0.0, number, state.generation, num, 1.0, 8, 0.1, 1.0, 0.5, False)
            self.now += 0.5
            vote = Vote(number, 1.0, 8, 1.0, num)
            self.deliver_all(StepCommitted(state.generation, record, vote))

    def lose(self, data_rank: int) -> None:
        self.deliver_all(WorkerLost(self.core.state.live.members()[data_rank], "killed"))


def lose_to_microbatch(run: PoisonedRun, microbatch: int, times: int) -> None:
    """Lose the worker that runs the microbatch, `times` times, after the requested checkpoints."""
    for _ in range(times):
        run.run_until_training()
        num = len(run.core.state.live.members())
        if run.resumes and run.resumes[-1].guarded_step == run.core.state.committed_step + 1:
            run.write_parts()
        run.lose(microbatch * num // JOB.num_microbatches)
    run.run_until_training()


def test_poison_samples_are_named_by_their_index_in_the_data() -> None:
    run = PoisonedRun(4)
    run.train_to(6)
    lose_to_microbatch(run, 0, 4)
    ending = run.core.state.ending
    ids = batch_ids(7, 8)
    indices = sorted(sample_of(JOB.seed, ids[i], JOB.num_samples) for i in (0, 1))
    assert ending and ending.reason.endswith(f"training samples {indices[0]}, {indices[1]}")


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_poison_sample_costs_no_committed_step(num_workers: int) -> None:
    """This holds even if the last worker that holds the state reads the sample."""
    run = PoisonedRun(num_workers)
    run.train_to(6)
    lose_to_microbatch(run, 0, 4)
    assert run.core.state.ending
    assert run.core.state.committed_step == run.core.state.checkpoints.saved_step == 6
    assert min(resume.step for resume in run.resumes) == 6


def test_step_that_ended_one_of_many_workers_is_not_guarded() -> None:
    """A single loss must not slow the recovery."""
    run = PoisonedRun(4)
    run.train_to(6)
    run.lose(1)
    run.run_until_training()
    assert [resume.guarded_step for resume in run.resumes] == [0]


def test_loss_during_an_evaluation_makes_held_out_samples_suspect() -> None:
    run = PoisonedRun(4)
    run.train_to(5)
    lose_to_microbatch(run, 0, 4)
    ending = run.core.state.ending
    assert ending and "the evaluation after step 5 has ended every worker" in ending.reason
    assert ending.reason.endswith("look at held-out samples 0 to 1")


def test_loss_after_a_reported_evaluation_makes_training_samples_suspect() -> None:
    run = PoisonedRun(4)
    run.train_to(5)
    run.deliver_all(Evaluated(run.core.state.generation, 5, 1.0))
    lose_to_microbatch(run, 0, 4)
    ending = run.core.state.ending
    assert ending and "step 6 has ended every worker" in ending.reason
