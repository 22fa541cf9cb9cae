"""Checkpoints that break or are slow while many workers write: files, patience, late writers."""

from __future__ import annotations

import pytest
from users_policy import quiet_policy

from elastic.controller.core import Core
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import (
    Command,
    DropCheckpoints,
    PublishCheckpoint,
    SaveCheckpoint,
    Stopped,
)
from elastic.protocol.events import (
    Checkpointed,
    Event,
    GroupFormed,
    PartFailed,
    PartFile,
    PartWritten,
    Paused,
    RunOpened,
    StateReady,
    StepCommitted,
    StopRequested,
    StoreReady,
    Woke,
    WorkerReady,
)
from elastic.protocol.notes import Warned
from elastic.protocol.phases import Saving
from elastic.protocol.votes import StepRecord, Vote

PATIENCE_S = 300.0
EVERY = 10


class ManyWriters:
    """A core whose members train, with a checkpoint after every tenth step."""

    def __init__(self, num_workers: int, per_node: int = 1) -> None:
        self.core = Core()
        policy = quiet_policy(1, num_workers, save_timeout_s=PATIENCE_S, keep_last=1)
        layout = TargetLayout.parse(f"dp={num_workers}", num_workers)
        job = Job(num_workers, steps=10**6, checkpoint_every=EVERY)
        self.deliver(0.0, RunOpened(1, policy, layout, job), StoreReady("host", 1))
        self.workers = [f"w{number}" for number in range(num_workers)]
        nodes = {w: f"node-{number // per_node}" for number, w in enumerate(self.workers)}
        self.deliver(0.0, *(WorkerReady(w, nodes[w], 1) for w in self.workers))
        self.deliver(0.0, *(GroupFormed(w, 1) for w in self.workers))
        ready = [StateReady(w, 1, 0, 0, 0.0, 1, 1, 2) for w in self.workers]
        self.deliver(0.0, *ready)
        self._step = 0

    def deliver(self, now: float, *events: Event) -> list[Command]:
        return [command for event in events for command in self.core.step(now, event)]

    def commit(self, now: float, step: int, num_writing: int = 0) -> list[Command]:
        """Commit the steps up to this one at one moment."""
        commands: list[Command] = []
        for number in range(self._step + 1, step + 1):
            world_size = len(self.workers)
            vote = Vote(number, 1.0, 1, 1.0, world_size, num_writing=num_writing)
            record = StepRecord(0.0, number, 1, world_size, 1.0, 1, 0.1, 1.0, 1.0, skipped=False)
            commands += self.deliver(now, StepCommitted(1, record, vote))
        self._step = step
        return commands

    def write(self, now: float, workers: list[str], step: int) -> list[Command]:
        """These workers report their parts."""
        files = {w: PartFile(f"part-{w}", 1, 0) for w in workers}
        return self.deliver(now, *(PartWritten(w, 1, step, files[w]) for w in workers))

    def look(self, now: float, num_writing: int) -> list[Command]:
        """Commit another step, whose vote says that members still write; the core looks again."""
        return [*self.commit(now, self._step + 1, num_writing), *self.deliver(now, Woke())]

    def draining(self) -> set[str]:
        return self.core.state.membership.draining


def dropped_in(commands: list[Command]) -> list[tuple[int, int]]:
    return [key for c in commands if isinstance(c, DropCheckpoints) for key in c.dropped]


def warnings_in(commands: list[Command]) -> list[str]:
    return [c.text for c in commands if isinstance(c, Warned) and c.kind == "checkpoint"]


def test_parts_that_end_after_the_removal_are_removed_with_the_next_checkpoint() -> None:
    """One write fails, and the files are removed while the other member still writes its part."""
    run = ManyWriters(2)
    run.commit(1.0, EVERY)
    run.deliver(2.0, PartFailed("w0", 1, EVERY, "no space"))
    assert dropped_in(run.deliver(30.0, Woke())) == [(EVERY, 1)]
    run.write(60.0, ["w1"], EVERY)
    run.commit(100.0, 2 * EVERY)
    run.write(101.0, run.workers, 2 * EVERY)
    assert dropped_in(run.deliver(102.0, Checkpointed(2 * EVERY, 1, "path"))) == [(EVERY, 1)]
    run.commit(200.0, 3 * EVERY)
    run.write(201.0, run.workers, 3 * EVERY)
    dropped = dropped_in(run.deliver(202.0, Checkpointed(3 * EVERY, 1, "path")))
    assert dropped == [(2 * EVERY, 1)], "each member has ended its older writes"


def test_older_checkpoint_that_completes_forgets_no_newer_broken_one() -> None:
    run = ManyWriters(2)
    run.commit(1.0, EVERY)
    run.write(2.0, run.workers, EVERY)
    run.commit(3.0, 2 * EVERY)
    run.deliver(4.0, PartFailed("w0", 1, 2 * EVERY, "no space"))
    assert dropped_in(run.deliver(5.0, Checkpointed(EVERY, 1, "path"))) == [(2 * EVERY, 1)]
    run.commit(100.0, 3 * EVERY)
    run.write(101.0, run.workers, 3 * EVERY)
    dropped = dropped_in(run.deliver(102.0, Checkpointed(3 * EVERY, 1, "path")))
    assert dropped == [(EVERY, 1), (2 * EVERY, 1)]


def test_slow_first_checkpoint_drains_no_worker_and_teaches_patience() -> None:
    """Half of the parts are written after the patience, and the others keep coming."""
    run = ManyWriters(40)
    run.commit(0.0, EVERY)
    run.write(299.0, run.workers[:20], EVERY)
    [warning] = warnings_in(run.look(300.0, num_writing=20))
    assert "still write" in warning and "and 16 more" in warning
    run.write(500.0, run.workers[20:25], EVERY)
    assert warnings_in(run.look(600.0, num_writing=15)) and run.draining() == set()
    commands = run.write(800.0, run.workers[25:], EVERY)
    assert any(isinstance(command, PublishCheckpoint) for command in commands)
    run.deliver(801.0, Checkpointed(EVERY, 1, "path"))
    run.commit(900.0, 2 * EVERY)
    [upload] = run.core.state.checkpoints.uploads.values()
    assert upload.deadline - upload.since == 4 * 800.0


def test_few_late_writers_are_drained_at_once() -> None:
    run = ManyWriters(40)
    run.commit(0.0, EVERY)
    run.write(50.0, run.workers[2:], EVERY)
    assert "each is replaced" in warnings_in(run.look(300.0, num_writing=2))[0]
    assert run.draining() == {"w0", "w1"}


def test_late_writers_of_one_node_are_drained_at_once() -> None:
    run = ManyWriters(40, per_node=8)
    run.commit(0.0, EVERY)
    run.write(50.0, run.workers[8:], EVERY)
    run.look(300.0, num_writing=8)
    assert run.draining() == set(run.workers[:8])


def test_run_on_one_node_whose_storage_is_slow_drains_no_worker() -> None:
    run = ManyWriters(8, per_node=8)
    run.commit(0.0, EVERY)
    run.write(50.0, run.workers[4:], EVERY)
    assert warnings_in(run.look(300.0, num_writing=4)) and run.draining() == set()


@pytest.mark.parametrize(("num_late", "hang"), [(10, True), (30, False)])
def test_many_late_writers_hang_if_none_ends_and_most_others_have(
    num_late: int, hang: bool
) -> None:
    run = ManyWriters(40)
    run.commit(0.0, EVERY)
    run.write(50.0, run.workers[num_late:], EVERY)
    run.look(300.0, num_writing=num_late)
    assert run.draining() == set()
    run.look(600.0, num_writing=num_late)
    assert run.draining() == (set(run.workers[:num_late]) if hang else set())


def test_checkpoint_that_breaks_late_raises_the_patience() -> None:
    run = ManyWriters(4)
    run.commit(0.0, EVERY)
    run.write(250.0, run.workers[:2], EVERY)
    run.deliver(260.0, PartFailed("w3", 1, EVERY, "slow down"))
    run.commit(700.0, 2 * EVERY)
    [upload] = run.core.state.checkpoints.uploads.values()
    assert upload.deadline - upload.since == 4 * 250.0


def test_early_break_does_not_lower_the_patience() -> None:
    run = ManyWriters(2)
    run.core.state.checkpoints.costs.writes_s = [200.0]
    for number in range(1, 8):
        run.commit(100.0 * number, number * EVERY)
        run.write(100.0 * number + 1.0, ["w0"], number * EVERY)
        run.deliver(100.0 * number + 2.0, PartFailed("w1", 1, number * EVERY, "no space"))
    assert run.core.state.checkpoints.costs.writes_s == [200.0]


def stopped_run(write_s: float) -> ManyWriters:
    """A run that writes its last checkpoint at time 0; earlier ones took `write_s`."""
    run = ManyWriters(2)
    run.core.state.checkpoints.costs.writes_s = [write_s]
    run.deliver(0.0, StopRequested("SIGTERM"))
    run.commit(0.0, 1)
    commands = run.deliver(0.0, *(Paused(w, 1, 1) for w in run.workers))
    assert any(isinstance(command, SaveCheckpoint) for command in commands)
    return run


def ends_in(commands: list[Command]) -> list[str]:
    return [command.reason for command in commands if isinstance(command, Stopped)]


def test_last_checkpoint_may_take_four_times_the_longest_recent_write() -> None:
    run = stopped_run(write_s=200.0)
    assert run.core.next_deadline() == 800.0
    assert not ends_in(run.deliver(799.0, Woke()))
    assert ends_in(run.deliver(800.0, Woke())) == ["SIGTERM; the last checkpoint took too long"]


def test_written_last_checkpoint_has_its_time_again_to_be_published() -> None:
    """It waits for storage; only once, so that the run ends."""
    run = stopped_run(write_s=10.0)
    generation = run.core.state.generation
    files = [PartWritten(w, generation, 1, PartFile(f"part-{w}", 1, 0)) for w in run.workers]
    run.deliver(299.0, *files)
    assert not ends_in(run.deliver(300.0, Woke()))
    assert run.core.next_deadline() == 300.0 + 4 * 299.0
    assert ends_in(run.deliver(400.0, Checkpointed(1, generation, "path"))) == ["SIGTERM"]


def test_last_checkpoint_that_is_never_published_ends_the_run_in_the_end() -> None:
    run = stopped_run(write_s=10.0)
    generation = run.core.state.generation
    files = [PartWritten(w, generation, 1, PartFile(f"part-{w}", 1, 0)) for w in run.workers]
    run.deliver(20.0, *files)
    run.deliver(300.0, Woke())
    assert isinstance(run.core.state.phase, Saving)
    assert ends_in(run.deliver(600.0, Woke()))


def test_all_files_of_a_large_part_are_published() -> None:
    run = ManyWriters(2)
    run.commit(1.0, EVERY)
    run.write(2.0, ["w0"], EVERY)
    first, second = PartFile("part-w1", 1, 0), PartFile("part-w1.1", 1, 0)
    commands = run.deliver(3.0, PartWritten("w1", 1, EVERY, first, (("w1", second),)))
    [publication] = [c for c in commands if isinstance(c, PublishCheckpoint)]
    assert [file.name for file in publication.files] == ["part-w0", "part-w1", "part-w1.1"]
