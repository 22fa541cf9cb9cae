"""A run that cannot have the workers that it needs makes room for others, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from command_line import Command, start
from test_controller_death import Ground, ground, wait_for
from test_model_axes import arguments

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
__all__ = ["ground"]
NUM_STEPS = 30
IMPATIENT = ("--set", "gang_timeout_s=15")


@pytest.fixture
def joined(ground: Ground) -> Iterator[Ground]:
    ray.init(address=ground.address, namespace="elastic", log_to_driver=False)
    yield ground
    ray.shutdown()


def drive(ground: Ground, storage: Path, name: str) -> Command:
    """A run that needs three of the four processors."""
    run = arguments("tiny", "dp=3", "3:3", NUM_STEPS)
    folder = ground.folder
    command = start("train", storage, folder, ground.address, *run, *IMPATIENT, "--run-name", name)
    command.folder = storage / name
    return command


def assert_trained(command: Command) -> None:
    code, output = command.finish()
    assert code == 0, output
    assert [line["step"] for line in command.metrics()] == list(range(1, NUM_STEPS + 1))


def test_all_workers_are_given_back_and_asked_for_again(tmp_path: Path, joined: Ground) -> None:
    @ray.remote(num_cpus=2)
    class Other:
        def is_there(self) -> bool:
            return True

    other = Other.remote()
    assert ray.get(other.is_there.remote())
    command = drive(joined, tmp_path, "run")
    command.wait_until(lambda: len(command.lines("WorkerReady")) == 2, "two of three workers")
    command.wait_until(lambda: len(command.lines("WorkerLost")) == 3, "the end of all three")
    wait_for(lambda: ray.available_resources().get("CPU") == 2, "free processors")
    assert {line["cause"] for line in command.lines("StopWorker")} == {"too few others have come"}
    ray.kill(other)
    assert_trained(command)
    assert not command.lines("Abort")


def test_two_runs_come_to_their_ends_one_after_the_other(tmp_path: Path, ground: Ground) -> None:
    """Each needs more than half of the cluster, whichever workers come first."""
    commands = [drive(ground, tmp_path / name, name) for name in ("one", "two")]
    for command in commands:
        assert_trained(command)
