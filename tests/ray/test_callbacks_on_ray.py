"""`elastic train --callback` on Ray: each step once, though controller and worker are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from command_line import elastic_train, read_lines

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
WRITES = """
import json, os
from pipelines.callbacks import Callback


class Writes(Callback):
    def write(self, **line):
        with open(os.environ["CALLS"], "a") as file:
            file.write(json.dumps(line) + "\\n")

    def on_start(self, run):
        self.write(call="start", pid=os.getpid(), step=run.step)

    def on_step(self, step):
        self.write(call="step", step=step.number, loss=step.loss)

    def on_reshard(self, reshard):
        self.write(call="reshard", step=reshard.step, generation=reshard.generation)

    def on_checkpoint(self, checkpoint):
        self.write(call="checkpoint", step=checkpoint.step)

    def on_end(self, result):
        self.write(call="end", step=result.step, outcome=result.outcome)


class Raises(Callback):
    def on_reshard(self, reshard):
        raise RuntimeError("no reshard")
"""


@pytest.mark.soak
def test_steps_are_called_once_through_a_killed_controller_and_worker(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("callbacks")
    (folder / "mine.py").write_text(WRITES)
    monkeypatch.setenv("CALLS", str(folder / "calls.jsonl"))
    with elastic_train(
        tmp_path, "tiny", "--data", "random", "--workers", "2:2", "--layout", "dp=2",
        "--steps", "100000", "--callback", f"{folder / 'mine.py'}:Writes",
        "--callback", f"{folder / 'mine.py'}:Raises",
    ) as command:  # fmt: skip
        command.wait_for_step(20)
        command.kill_controller()
        command.wait_until(lambda: command.lines("ControllerRestarted"), "the controller")
        command.wait_for_step(len(command.metrics()) + 20)
        os.kill(command.pid_of("w1"), signal.SIGKILL)
        command.wait_until(lambda: len(command.lines("Resume")) >= 2, "the recovery")
        command.wait_for_step(len(command.metrics()) + 20)
        pid = command.process.pid
        command.process.send_signal(signal.SIGINT)
        code, output = command.finish()
        metrics, resumes = command.metrics(), command.lines("Resume")
    assert code == 130, output
    calls = read_lines(folder / "calls.jsonl")
    assert calls[0] == {"call": "start", "pid": pid, "step": 0}
    steps = [call for call in calls if call["call"] == "step"]
    assert [(c["step"], c["loss"]) for c in steps] == [(m["step"], m["loss"]) for m in metrics]
    assert [call["step"] for call in steps] == list(range(1, metrics[-1]["step"] + 1))
    reshards = [call["generation"] for call in calls if call["call"] == "reshard"]
    assert reshards == [line["generation"] for line in resumes[1:]] and reshards
    last = metrics[-1]["step"]
    assert calls[-2:] == [
        {"call": "checkpoint", "step": last},
        {"call": "end", "step": last, "outcome": "interrupted"},
    ]
    assert output.count("callback Raises.on_reshard raised RuntimeError: no reshard") == 2, output
