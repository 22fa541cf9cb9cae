"""What a worker flushed before its SIGKILL is in the run's folder, also of a worker on a node other
than the controller's."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from command_line import elastic
from shared_cluster import elastic_train
from test_ray_parity import hosts_controller_or_store, processes_of_node, train_on_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KILLED_AT = 25
SCRIPT = """
import time
import torch


def train(run):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(64, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps({steps}, microbatches=4):
        print(f"begins {{step.number}}", flush=True)
        with step:
            for (points,) in step.batches():
                time.sleep({pause_s})
                step.backward(model(points).square().mean())
"""


def write_script(folder: Path, steps: int, pause_s: float) -> str:
    script = folder / "loop.py"
    script.write_text(SCRIPT.format(steps=steps, pause_s=pause_s))
    return f"{script}:train"


def test_lines_flushed_just_before_the_kill_are_printed_by_elastic_logs(tmp_path: Path) -> None:
    train = (write_script(tmp_path, 40, 0.0), "--workers", "2", "--layout", "dp=2")
    fault = f"kill worker 0 at step {KILLED_AT}"
    with elastic_train(tmp_path, *train, "--inject", fault) as command:
        code, output = command.finish()
        lost = [line["worker"] for line in command.lines("WorkerLost")]
        others = {line["worker"] for line in command.lines("WorkerReady")} - {"w0"}
    assert code == 0, output
    assert lost == ["w0"]
    logs = elastic("logs", "run", "--worker", "w0", "--storage", str(tmp_path))
    assert logs.returncode == 0, logs.stderr
    lines = [line for line in logs.stdout.splitlines() if line.startswith("begins")]
    assert list(dict.fromkeys(lines)) == [f"begins {step}" for step in range(1, KILLED_AT + 1)]
    last = [
        (tmp_path / "run" / "logs" / f"{worker}.out").read_text().splitlines()[-1]
        for worker in others
    ]
    assert "begins 40" in last, "what was printed last before the end of the run"


@pytest.mark.soak
def test_agent_copies_the_output_of_a_worker_killed_on_another_node(tmp_path: Path) -> None:
    train = (write_script(tmp_path, 100_000, 0.02), "--workers", "2", "--layout", "dp=2")
    with train_on_nodes(tmp_path, *train, num_nodes=2) as command:
        command.wait_for_step(30)
        pid_of_worker = {line["worker"]: line["pid"] for line in command.lines("WorkerReady")}
        worker, pid = next(
            (worker, pid)
            for worker, pid in pid_of_worker.items()
            if not hosts_controller_or_store(processes_of_node(pid))
        )
        process = psutil.Process(pid)
        process.suspend()  # so that it prints nothing between this look and its end
        source = Path(os.readlink(f"/proc/{pid}/fd/1"))
        written = source.read_bytes()
        process.kill()
        kept = tmp_path / "run" / "logs" / f"{worker}.out"
        command.wait_until(
            lambda: kept.exists() and kept.read_bytes() == written, "the copy of all it printed"
        )
        assert written.splitlines()[-1].startswith(b"begins ")
        command.process.send_signal(signal.SIGINT)
        assert command.finish()[0] == 130
