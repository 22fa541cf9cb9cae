"""A converted script from the command line, on a real Ray cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import ROOT
from shared_cluster import elastic_train

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
SCRIPT = f"{ROOT / 'examples' / 'torch_trainer_after.py'}:train_func"


def test_a_custom_loop_continues_without_a_killed_worker(tmp_path: Path) -> None:
    with elastic_train(
        tmp_path, SCRIPT, "--workers", "3", "--layout", "dp=3",
        "--inject", "kill worker 1 at step 10",
    ) as command:  # fmt: skip
        code, output = command.finish()
        metrics = command.metrics()
        lost = [line["worker"] for line in command.lines("WorkerLost")]
    assert code == 0, output
    assert lost == ["w1"]
    assert [line["step"] for line in metrics] == list(range(1, 37))
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert {line["tokens"] for line in metrics} == {64}
