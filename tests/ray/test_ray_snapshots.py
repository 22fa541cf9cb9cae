"""SIGKILLs of workers with the only copy of a shard on a real Ray cluster: snapshots cover them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from command_line import Command
from shared_cluster import elastic_train
from test_model_axes import SETTINGS, arguments

sys.path.append(str(Path(__file__).parents[1] / "processes"))

from expected import expected

from pipelines.run.recipes import load
from pipelines.settings.overrides import override

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]
NUM_STEPS = 120


def are_protected(command: Command, generation: int) -> bool:
    """Whether every worker's snapshot is whole in this generation or a later one."""
    return any(
        line["vote"]["num_snapshots"] == line["record"]["world_size"]
        for line in command.lines("StepCommitted")
        if line["generation"] >= generation
    )


def assert_nothing_is_lost(command: Command, num_steps: int) -> None:
    """The losses equal those of the undisturbed plain loop, at most one step is redone, and nothing
    is restored from storage."""
    seen, _ = expected(override(load("tiny"), SETTINGS), num_steps)
    last = {line["step"]: line["loss"] for line in command.metrics()}
    assert list(last) == list(range(1, num_steps + 1))
    assert list(last.values()) == pytest.approx([loss for loss, _ in seen], rel=1e-9)
    for line in command.lines("RolledBack"):
        assert line["from_step"] - line["step"] <= 1
    sources = [line["source"] for line in command.lines("Resharded")][1:]
    assert "snapshot" in sources
    assert set(sources) <= {"snapshot", "live"}


@pytest.mark.parametrize("layout", ["fsdp=4", "pp=2,fsdp=2"])
def test_worker_with_the_only_copy_of_its_shard(tmp_path: Path, layout: str) -> None:
    with elastic_train(tmp_path, *arguments("tiny", layout, "2:4", NUM_STEPS)) as command:
        command.wait_until(lambda: are_protected(command, 1), "the first snapshots")
        os.kill(command.pid_of("w2"), signal.SIGKILL)
        code, output = command.finish()
        assert code == 0, output
        assert_nothing_is_lost(command, NUM_STEPS)


def test_all_workers_at_once(tmp_path: Path) -> None:
    """Only the snapshot server is left, and new workers begin from its snapshots."""
    with elastic_train(tmp_path, *arguments("tiny", "fsdp=4", "4:4", NUM_STEPS)) as command:
        command.wait_until(lambda: are_protected(command, 1), "the first snapshots")
        for worker in ("w0", "w1", "w2", "w3"):
            os.kill(command.pid_of(worker), signal.SIGKILL)
        code, output = command.finish()
        assert code == 0, output
        assert_nothing_is_lost(command, NUM_STEPS)
