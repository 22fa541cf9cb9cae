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


def has_complete_snapshots(command: Command, generation: int) -> bool:
    """Whether the snapshot of every worker is complete in this generation or a later one."""
    return any(
        line["vote"]["num_snapshots"] == line["record"]["world_size"]
        for line in command.lines("StepCommitted")
        if line["generation"] >= generation
    )


def assert_recovered_from_snapshots(command: Command, num_steps: int) -> None:
    """The losses equal those of the plain loop, at most one step is repeated, and no state is
    restored from storage."""
    losses_and_norms, _ = expected(override(load("tiny"), SETTINGS), num_steps)
    loss_of_step = {line["step"]: line["loss"] for line in command.metrics()}
    assert list(loss_of_step) == list(range(1, num_steps + 1))
    assert list(loss_of_step.values()) == pytest.approx(
        [loss for loss, _ in losses_and_norms], rel=1e-9
    )
    for line in command.lines("RolledBack"):
        assert line["from_step"] - line["step"] <= 1
    sources = [line["source"] for line in command.lines("Resharded")][1:]
    assert "snapshot" in sources
    assert set(sources) <= {"snapshot", "live"}


@pytest.mark.parametrize("layout", ["fsdp=4", "pp=2,fsdp=2"])
def test_loss_of_the_only_copy_of_a_shard_recovers_from_snapshots(
    tmp_path: Path, layout: str
) -> None:
    with elastic_train(tmp_path, *arguments("tiny", layout, "2:4", NUM_STEPS)) as command:
        command.wait_until(lambda: has_complete_snapshots(command, 1), "the first snapshots")
        os.kill(command.pid_of("w2"), signal.SIGKILL)
        code, output = command.finish()
        assert code == 0, output
        assert_recovered_from_snapshots(command, NUM_STEPS)


def test_loss_of_all_workers_recovers_from_snapshots(tmp_path: Path) -> None:
    """Only the snapshot server is left, and new workers recover from its snapshots."""
    with elastic_train(tmp_path, *arguments("tiny", "fsdp=4", "4:4", NUM_STEPS)) as command:
        command.wait_until(lambda: has_complete_snapshots(command, 1), "the first snapshots")
        for worker in ("w0", "w1", "w2", "w3"):
            os.kill(command.pid_of(worker), signal.SIGKILL)
        code, output = command.finish()
        assert code == 0, output
        assert_recovered_from_snapshots(command, NUM_STEPS)
