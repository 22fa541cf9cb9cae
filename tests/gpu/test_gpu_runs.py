"""Complete runs over NCCL with real SIGKILLs equal the run of one worker on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Outcome, run_in_processes
from one_gpu import NEEDS_GPU

from actors.runtime.fault_spec import Fault
from elastic.protocol.events import WorkerDraining
from pipelines.run.recipes import tiny
from pipelines.settings import CheckpointSettings, DataSettings, TrainSettings

pytestmark = NEEDS_GPU

NUM_STEPS = 24
SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "steps": NUM_STEPS,
        "eval_every": 8,
        "eval_samples": 4,
    }
)
COLLECTIVE_TIMEOUT_S = 60.0
MAX_UNBLOCK_S = 10.0
"""Far below the timeout of a collective: a worker that resumed by then did not wait for it."""


def train(folder: Path, num_workers: int, settings: TrainSettings = SETTINGS, **options) -> Outcome:
    limits = {"collective_timeout_s": COLLECTIVE_TIMEOUT_S, "timeout_s": 280.0}
    return run_in_processes(
        folder, settings, num_workers, program="one_gpu:program", **limits, **options
    )


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("cpu")
    return run_in_processes(folder, SETTINGS, 1, program="one_gpu:program_on_cpu")


def assert_equal_training(run: Outcome, on_cpu: Outcome) -> None:
    assert run.stopped.outcome == "completed", run.stopped
    assert run.losses() == pytest.approx(on_cpu.losses(), rel=1e-8)
    held_out_losses, expected = (
        {line["step"]: line["loss"] for line in outcome.lines_of("Evaluated")}
        for outcome in (run, on_cpu)
    )
    assert held_out_losses == pytest.approx(expected, rel=1e-8)


def assert_no_step_repeated(run: Outcome) -> None:
    assert [line["step"] for line in run.metrics] == list(range(1, NUM_STEPS + 1))
    assert not run.lines_of("RolledBack")


def assert_unblocked(run: Outcome) -> None:
    """Assert that survivors were aborted, and did not wait for a timeout of their collectives."""
    lost_at = run.lines_of("WorkerLost")[0]["time"]
    resumed_at = next(line["time"] for line in run.lines_of("Resume") if line["time"] > lost_at)
    assert resumed_at - lost_at < MAX_UNBLOCK_S


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "fsdp=2", "dp=2,fsdp=2"])
def test_training_over_nccl_equals_the_cpu(layout: str, tmp_path: Path, on_cpu) -> None:
    num_workers = {"dp=1": 1, "dp=2,fsdp=2": 4}.get(layout, 2)
    run = train(tmp_path, num_workers, layout=layout)
    assert_equal_training(run, on_cpu)
    assert len(run.lines_of("Resume")) == 1


@pytest.mark.parametrize("moment", ["compute", "vote", "apply"])
def test_survivors_of_a_kill_keep_their_processes(moment, tmp_path: Path, on_cpu) -> None:
    run = train(tmp_path, 3, layout="dp=3", faults=(Fault("kill", "w2", 10, moment),))
    assert_equal_training(run, on_cpu)
    assert_no_step_repeated(run)
    assert_unblocked(run)
    assert [line["worker"] for line in run.lines_of("WorkerLost")] == ["w2"]


def test_lost_shard_comes_from_its_replica(tmp_path: Path, on_cpu) -> None:
    """Three of four workers survive: two of them exchange pieces in both directions."""
    faults = (Fault("kill", "w3", 10, "compute"),)
    run = train(tmp_path, 4, layout="dp=2,fsdp=2", faults=faults)
    assert_equal_training(run, on_cpu)
    assert_no_step_repeated(run)
    assert_unblocked(run)
    resharded = run.lines_of("Resharded")[1]
    assert resharded["source"] == "live"
    assert resharded["bytes_moved"] == resharded["bytes_needed"] > 0


def test_draining_worker_sends_its_shard(tmp_path: Path, on_cpu) -> None:
    run = train(tmp_path, 2, layout="fsdp=2", due=((8, WorkerDraining("w1", "drained")),))
    assert_equal_training(run, on_cpu)
    assert_no_step_repeated(run)
    assert run.lines_of("Resharded")[1]["bytes_moved"] > 0


def test_shard_without_a_holder_comes_from_the_checkpoint(tmp_path: Path, on_cpu) -> None:
    settings = SETTINGS.model_copy(update={"checkpoint": CheckpointSettings(every=8)})
    faults = (Fault("kill", "w1", 20, "compute"),)
    run = train(tmp_path, 2, settings, layout="fsdp=2", faults=faults)
    assert_equal_training(run, on_cpu)
    [rolled_back] = run.lines_of("RolledBack")
    assert rolled_back["step"] in (8, 16)
    assert rolled_back["from_step"] in (18, 19)  # w1 may die before w0 has read the vote of 19


@pytest.mark.parametrize("layout", ["dp=3", "dp=2,fsdp=2"])
def test_replicas_stay_equal_bit_for_bit(layout: str, tmp_path: Path, on_cpu) -> None:
    num_workers = 3 if layout == "dp=3" else 4
    run = train(tmp_path, num_workers, layout=layout, audit_every=1)
    assert_equal_training(run, on_cpu)
    assert len(run.lines_of("Audited")) == NUM_STEPS
    assert not any(line["splits"] for line in run.lines_of("Audited"))


def test_flipped_bit_is_detected(tmp_path: Path) -> None:
    flip = Fault("flip", "w1", 7)
    run = train(tmp_path, 3, layout="dp=3", faults=(flip,), audit_every=5)
    assert run.stopped.outcome == "completed"
    split, *_ = [line for line in run.lines_of("Audited") if line["splits"]]
    assert split["splits"] == [[["w0", "w2"], ["w1"]]]
    assert [line["worker"] for line in run.lines_of("WorkerLost")] == ["w1"]
