"""Machines that fail a check get no rank; members whose device degrades leave the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Outcome, run_in_processes
from run_checks import assert_no_step_repeated

from pipelines.run.fault_sentences import parse_faults
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings, HealthSettings

pytestmark = pytest.mark.slow

SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "steps": 300,
        "batch": 12,
    }
)
NODE_OF = {"w0": "a", "w1": "b", "w2": "c"}
KILL = "kill worker 2 at step 5"


def train(
    folder: Path,
    *sentences: str,
    steps: int = 300,
    check: str | None = None,
    **policy: float,
) -> Outcome:
    """Three workers on nodes a, b and c; each replacement starts on c unless c is quarantined."""
    faults, _ = parse_faults(sentences)
    settings = SETTINGS.model_copy(update={"steps": steps, "health": HealthSettings(check=check)})
    return run_in_processes(
        folder,
        settings,
        3,
        faults=faults,
        node_of=lambda worker: NODE_OF.get(worker, "c"),
        **policy,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("undisturbed"))


def assert_replaced_elsewhere(run: Outcome, refused: str, reason: str) -> None:
    """The worker `refused` was never ready, and its replacement trains on another node."""
    assert run.stopped.outcome == "completed", run.stopped
    [raised] = [line for line in run.lines_of("WorkerRaised") if line["kind"] == "health"]
    assert (raised["worker"], raised["node"]) == (refused, "c")
    assert reason in raised["message"] and not raised["traceback"]
    [quarantined] = run.lines_of("NodeQuarantined")
    assert quarantined["node"] == "c" and reason in quarantined["cause"]
    assert refused not in [line["worker"] for line in run.lines_of("WorkerReady")]
    last = run.lines_of("StartWorkers")[-1]
    assert last["workers"] == [f"w{int(refused[1:]) + 1}"] and last["quarantined"] == ["c"]
    assert_no_step_repeated(run)


@pytest.mark.soak
def test_worker_with_slow_links_never_joins(tmp_path: Path, undisturbed: Outcome) -> None:
    run = train(tmp_path, KILL, "slow link of worker 3 by 150x", steps=2500)
    assert_replaced_elsewhere(run, "w3", "those between members")
    first_losses = {step: loss for step, loss in run.losses().items() if step <= 300}
    assert first_losses == pytest.approx(undisturbed.losses(), rel=1e-9)


@pytest.mark.soak
def test_worker_on_a_device_with_errors_never_joins(tmp_path: Path, undisturbed: Outcome) -> None:
    run = train(tmp_path, KILL, "ecc error in worker 3")
    assert_replaced_elsewhere(run, "w3", "ECC")
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)


def test_first_worker_with_slow_links_leaves_at_a_step_boundary(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    run = train(tmp_path, "slow link of worker 1 by 40x")
    assert run.stopped.outcome == "completed", run.stopped
    [warned] = [line for line in run.lines_of("Warned") if line["kind"] == "health"]
    assert warned["text"].startswith("w1 on b: none of its links is faster than")
    assert [line["node"] for line in run.lines_of("NodeQuarantined")] == ["b"]
    first, second, *_ = [set(line["workers"]) for line in run.lines_of("Resume")]
    assert first == {"w0", "w1", "w2"} and second == {"w0", "w2"}
    assert not run.lines_of("Abort")
    assert_no_step_repeated(run)
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)


@pytest.mark.soak
def test_member_whose_device_degrades_leaves_at_a_step_boundary(tmp_path: Path) -> None:
    run = train(tmp_path, "ecc error in worker 1 at step 3", steps=1000)
    assert run.stopped.outcome == "completed", run.stopped
    [draining] = run.lines_of("WorkerDraining")
    assert draining["worker"] == "w1" and draining["is_degraded"]
    assert [line["node"] for line in run.lines_of("NodeQuarantined")] == ["b"]
    assert "w1" not in run.lines_of("Resume")[1]["workers"]
    assert not run.lines_of("Abort")
    assert_no_step_repeated(run)


def test_healthy_machines_are_left_alone(undisturbed: Outcome) -> None:
    assert undisturbed.stopped.outcome == "completed"
    assert not undisturbed.lines_of("Warned") and not undisturbed.lines_of("NodeQuarantined")
    machines = [line["machine"] for line in undisturbed.lines_of("WorkerReady")]
    assert len(machines) == 3 and all(m["product_s"] > 0 and m["port"] > 0 for m in machines)


def test_check_of_the_site_refuses_a_run_whose_machines_all_fail(tmp_path: Path) -> None:
    few = {"restart_backoff_s": 0.1, "max_start_failures": 1}
    run = train(tmp_path, check="refusing_site:check", **few)
    assert run.stopped.outcome == "user_error", run.stopped
    assert "refusing_site:check: this site refuses cpu" in run.stopped.reason
