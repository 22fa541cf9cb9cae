"""`elastic train` on a real Ray, with real signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from command_line import on_own_cluster
from mlflow import MlflowClient
from shared_cluster import elastic_train

from elastic.protocol.wire import FORMAT

pytestmark = pytest.mark.timeout(900)
TINY = ("tiny", "--data", "random", "--set", "dtype=float64")


@pytest.mark.soak
def test_killed_worker_is_replaced_and_the_run_completes(tmp_path: Path) -> None:
    with on_own_cluster(
        "train", tmp_path, *TINY, "--workers", "3", "--steps", "400", "--layout", "dp=3",
        "--inject", "kill worker 0 at step 40", "--run-name", "run",
    ) as command:  # fmt: skip
        code, output = command.finish()
        resumes = [line["workers"] for line in command.lines("Resume")]
        metrics = command.metrics()
    assert code == 0, output
    members = [sorted(workers) for workers in resumes]
    assert members == [["w0", "w1", "w2"], ["w1", "w2"], ["w1", "w2", "w3"]]
    assert [line["step"] for line in metrics] == list(range(1, 401)), "no step is repeated or lost"
    assert "w0" in output and "completed" in output
    [run] = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["1"])
    history = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_metric_history(
        run.info.run_id, "loss"
    )
    assert {point.step: point.value for point in history} == pytest.approx(
        {line["step"]: line["loss"] for line in metrics}
    )
    assert run.info.status == "FINISHED"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak)],
)
def test_interrupted_run_saves_a_checkpoint_and_resumes(
    tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    with elastic_train(tmp_path, *TINY, "--workers", "2", "--steps", "100000") as command:
        command.wait_for_step(10)
        command.process.send_signal(number)
        code, output = command.finish()
        stopped_at = len(command.metrics())
        assert command.lines("Checkpointed")[-1]["step"] == stopped_at
    assert code == exit_code, output
    steps = str(stopped_at + 20)
    with elastic_train(tmp_path, *TINY, "--workers", "1", "--steps", steps) as command:
        code, output = command.finish()
        metrics = command.metrics()
    assert code == 0, output
    assert [line["step"] for line in metrics] == list(range(1, stopped_at + 21))


@pytest.mark.soak
def test_second_driver_is_refused_and_a_killed_driver_leaves_no_process(
    tmp_path: Path,
) -> None:
    arguments = (*TINY, "--workers", "2", "--steps", "100000", "--run-name", "run")
    with on_own_cluster("train", tmp_path, *arguments) as first:
        first.wait_for_step(5)
        with on_own_cluster("train", tmp_path, *arguments) as second:
            code, output = second.finish()
        assert code == 2, output
        assert "drives this run" in output and "Traceback" not in output
        num_steps = len(first.metrics())
        first.wait_for_step(num_steps + 5)
        first.process.kill()
        # `on_own_cluster` asserts that the dead driver leaves no process behind.


@pytest.mark.soak
def test_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    """The refusal is one line; the lease is released and no file is changed."""
    journal = tmp_path / "run" / "journal.jsonl"
    journal.parent.mkdir()
    journal.write_text('{"time": 1.0, "format": 1, "event": "StoreReady"}\n')
    with elastic_train(tmp_path, *TINY, "--workers", "1", "--steps", "5") as command:
        code, output = command.finish()
    assert code == 2
    [line] = [line for line in output.splitlines() if line.startswith("elastic: ")]
    assert (
        f"journal format 1, this version reads {FORMAT}: start a new run name" in line
        and "Traceback" not in output
    )
    assert len(journal.read_text().splitlines()) == 1


@pytest.mark.soak
def test_workers_killed_and_stopped_by_signals_are_replaced(tmp_path: Path) -> None:
    """SIGKILL of one worker and SIGSTOP of another at arbitrary moments."""
    with elastic_train(
        tmp_path, *TINY, "--workers", "2:4", "--steps", "200", "--layout", "dp=2,fsdp=2"
    ) as command:
        command.wait_for_step(10)
        os.kill(command.pid_of("w1"), signal.SIGKILL)
        command.wait_until(lambda: len(command.lines("Resume")) >= 2, "the first recovery")
        command.wait_for_step(len(command.metrics()) + 5)
        survivor = command.lines("Resume")[-1]["workers"][-1]
        os.kill(command.pid_of(survivor), signal.SIGSTOP)
        code, output = command.finish()
        lost = [line["worker"] for line in command.lines("WorkerLost")]
        metrics = command.metrics()
        rolled_back = command.lines("RolledBack")
    assert code == 0, output
    assert lost == ["w1", survivor]
    assert not rolled_back
    assert [line["step"] for line in metrics] == list(range(1, 201))


@pytest.mark.soak
def test_exception_in_the_model_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    with elastic_train(
        tmp_path, *TINY, "--workers", "2", "--inject", "raise in worker 1 at step 7"
    ) as command:
        code, output = command.finish()
    assert code == 1
    assert "w1: RuntimeError: injected fault: w1 raises at step 7" in output
    assert "Traceback (most recent call last)" in output


@pytest.mark.soak
def test_custom_recipe_of_another_folder_trains(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from pipelines.run.recipes import tiny\n\n\n"
        "def small():\n    return tiny().model_copy(update={'steps': 7})\n"
    )
    with elastic_train(
        tmp_path, f"{recipe}:small", "--data", "random", "--workers", "1"
    ) as command:
        code, output = command.finish()
        assert code == 0, output
        assert len(command.metrics()) == 7


@pytest.mark.soak
def test_flipped_bit_is_found_and_skipped_steps_end_the_run_with_a_checkpoint(
    tmp_path: Path,
) -> None:
    """The audit finds a flipped bit. Then too many consecutive steps are skipped, and the run ends
    with a checkpoint."""
    with elastic_train(
        tmp_path, *TINY, "--workers", "3", "--steps", "400", "--layout", "dp=3",
        "--audit-every", "5", "--set", "loss_monitor.max_skipped=2",
        "--inject", "flip a bit in worker 1 at step 7",
        "--inject", "nan in worker 2 at step 20", "--inject", "nan in worker 0 at step 21",
    ) as command:  # fmt: skip
        code, output = command.finish()
        audit, *_ = [line for line in command.lines("Audited") if line["splits"]]
        checkpointed_step = command.lines("Checkpointed")[-1]["step"]
        skipped = [line["step"] for line in command.metrics() if line["skipped"]]
    assert code == 1, output
    assert audit["splits"] == [[["w0", "w2"], ["w1"]]]
    assert "w1 holds different bits than 2 replicas" in output
    assert skipped == [20, 21] and checkpointed_step == len(command.metrics())
    assert "failed: steps 20 to 21 were all skipped" in output
