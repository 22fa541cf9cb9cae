"""`ElasticTrainer` in a user's script, on a real Ray."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import PATIENCE_S, ROOT, assert_no_process_left, ray_folder, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Script:
    """The output of the script, and the folder of its runs."""

    observed: dict[str, Any]
    output: str
    storage: Path


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    with run_script(tmp_path_factory.mktemp("runs"), "fits", "handles") as script:
        yield script


@contextmanager
def run_script(storage: Path, *parts: str) -> Iterator[Script]:
    """Run these parts of the user's script on a Ray of its own."""
    with ray_folder() as folder:
        ended = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("user_script.py")), storage, *parts],
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
            env={**os.environ, "RAY_ADDRESS": "local", "RAY_TMPDIR": folder},
            cwd=ROOT,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert_no_process_left(folder)
        lines = ended.stdout.splitlines()  # Ray prints warnings among them
        [result] = [line for line in lines if line.startswith("{")]
        shown = "\n".join(line for line in lines if line != result)
        yield Script(json.loads(result), shown, storage)


def test_fit_survives_a_kill_and_returns_a_result(script: Script) -> None:
    shown = script.observed["fits"]["shown"]
    assert shown["steps"] == list(range(1, 9)) and len(shown["losses"]) == 8
    assert len(shown["generations"]) >= 2, "no worker was killed"
    assert (shown["metrics"]["step"], shown["error"]) == (8, None)
    assert shown["path"] == str(script.storage / "mine")
    assert Path(shown["checkpoint"]).is_relative_to(script.storage / "mine" / "checkpoints")
    assert "step-00000008" in shown["checkpoint"]
    recipe = json.loads((script.storage / "mine" / "recipe.json").read_text())
    assert recipe["recipe"] == "__main__:small" and recipe["settings"]["seed"] == 11


def test_callbacks_are_called_for_each_step_and_a_failed_one_is_in_the_result(
    script: Script,
) -> None:
    fits, handles = script.observed["fits"], script.observed["handles"]
    called = fits["called"]
    assert [call for call in called if call.startswith("step")] == [
        f"step {n}" for n in range(1, 9)
    ]
    assert "reshard 3" in called and called[-1] == "end completed"
    [failure] = fits["failed_callbacks"]
    assert failure.startswith("callback RaisesAtStep3.on_step raised ValueError: the third at step")
    last = handles["stopped"]["metrics"]["step"]
    called = [call for call in handles["called"] if call.startswith("step")]
    assert called == [f"step {n}" for n in range(9, last + 1)]
    assert handles["called"][-1] == "end interrupted"


def test_only_a_verbose_run_prints_its_progress(script: Script) -> None:
    assert f"run mine: {script.storage / 'mine'}" in script.output and "w1 lost" in script.output
    assert "run broken" not in script.output and script.output.count("completed at step") == 1


def test_exception_of_the_user_is_raised_with_its_traceback(script: Script) -> None:
    failure = script.observed["fits"]["failure"]
    assert failure.startswith("run 'broken' failed at step 2") and "Traceback" in failure


def test_start_with_the_same_name_resumes_the_run(script: Script) -> None:
    observed = script.observed["handles"]
    assert observed["reshard"].startswith("run mine: dp=2 -> fsdp=2 at step ")
    assert "needs 3 workers" in observed["refusal"] and "\n" not in observed["refusal"]
    assert observed["timeout"] == "run 'mine' has not ended within 0.1 s"
    assert (observed["status"]["phase"], observed["status"]["layout"]) == ("training", "fsdp=2")
    assert observed["representation"].startswith("<run mine: training · ")
    stopped, before = observed["stopped"], script.observed["fits"]["shown"]
    assert stopped["losses"][:8] == before["losses"] and not math.isnan(stopped["losses"][8])
    assert stopped["steps"] == list(range(1, stopped["metrics"]["step"] + 1))
    assert f"step-{stopped['metrics']['step']:08d}" in stopped["checkpoint"]
    assert {"layout", "checkpoint", "stopped"} <= set(observed["events"])


def test_ray_dataset_is_read_by_index(script: Script) -> None:
    observed = script.observed["data"]
    assert (
        sorted(observed["squares"]) == [number**2 for number in range(40)]
        and observed["again"] == 40
    )


def test_ray_stays_initialized_and_no_actor_is_left(script: Script) -> None:
    assert script.observed["ray_is_kept"]
    assert not script.observed["left"]


@pytest.mark.soak
def test_tune_runs_two_trials_on_one_cluster(tmp_path: Path) -> None:
    with run_script(tmp_path, "trials") as script:
        observed, left = script.observed["trials"], script.observed["left"]
    assert not left
    assert not observed["errors"] and len(observed["trials"]) == 2
    runs = [Path(trial["run"]) for trial in observed["trials"]]
    assert len(set(runs)) == 2 and observed["best"] in map(str, runs)
    for trial, run in zip(observed["trials"], runs, strict=True):
        assert trial["step"] == 6 and trial["training_iteration"] == 3
        recipe = json.loads((run / "recipe.json").read_text())
        assert recipe["settings"]["optimizer"]["lr"] == trial["config"]["optimizer.lr"]
        [stopped] = [x for x in read_lines(run / "journal.jsonl") if x.get("command") == "Stopped"]
        assert stopped["outcome"] == "interrupted" and stopped["step"] >= 6
        assert any((run / "checkpoints").glob(f"step-{stopped['step']:08d}-*/manifest.json"))
        called = json.loads((tmp_path / f"{run.name}.steps").read_text())
        assert called == list(range(1, stopped["step"] + 1)), "each trial has its own callback"
