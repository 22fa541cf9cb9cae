"""`elastic reshard` from another process, on a real Ray cluster."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest
from command_line import elastic
from shared_cluster import elastic_train

pytestmark = pytest.mark.timeout(900)
TINY = ("tiny", "--data", "random", "--set", "dtype=float64")
DONE = re.compile(
    r"run run: (\S+) -> (\S+) at step (\d+), generation (\d+); .* s pause, .* MB moved\n"
)


@pytest.mark.soak
def test_reshard_changes_the_layout_of_a_running_run(tmp_path: Path) -> None:
    def reshard(layout: str) -> tuple[int, str, str]:
        ended = elastic("reshard", "run", "--layout", layout, "--storage", str(tmp_path))
        return ended.returncode, ended.stdout, ended.stderr

    arguments = (*TINY, "--workers", "2:2", "--steps", "100000", "--layout", "dp=2")
    with elastic_train(tmp_path, *arguments) as command:
        command.wait_for_step(3)
        code, out, err = reshard("fsdp=2")
        assert (code, err) == (0, "")
        old, new, step, generation = DONE.fullmatch(out).groups()
        assert (old, new) == ("dp=2", "fsdp=2")
        assert int(step) >= 3 and int(generation) >= 2
        assert reshard("fsdp=2") == (
            0,
            "run run: the layout is already fsdp=2; nothing to do\n",
            "",
        )
        code, out, err = reshard("fsdp=3")
        assert (code, out) == (2, "")
        assert err.count("\n") == 1 and "needs 3 workers" in err
        num_steps = len(command.metrics())
        command.wait_for_step(num_steps + 3)
        assert {line["pid"] for line in command.lines("WorkerReady")} == {
            command.pid_of("w0"),
            command.pid_of("w1"),
        }
        assert not command.lines("WorkerLost") and not command.lines("RolledBack")
        layouts = [line["layout"] for line in command.lines("Resume")]
        assert [layout for layout, _ in groupby(layouts)] == ["dp=2", "fsdp=2"]
        command.process.terminate()
        code, output = command.finish()
        metrics = command.metrics()
    assert code == 143, output
    assert "layout fsdp=2 requested instead of dp=2" in output
    assert "layout refused: it needs 3 workers" in output
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    code, out, err = reshard("dp=2")
    assert code == 2 and "not running (interrupted at step" in err
