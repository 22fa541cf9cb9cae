"""`elastic plan --measured FILE` measures this machine once, and predicts steps from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process_command import RunCommand, in_process

from elastic.protocol.wire import decode
from pipelines.plan.calibration import Measured, num_measuring

pytestmark = pytest.mark.slow

SMALL = ("--workers", "2", "--json", "--set", "batch=8")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    return in_process("plan", monkeypatch, capsys)


def test_a_machine_is_measured_once_for_a_recipe(plan: RunCommand, tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    code, out, _ = plan("tiny", *SMALL, "--measured", str(file))
    first = json.loads(out)
    assert code == 0 and any("measured in" in note for note in first["notes"])
    measured = decode(Measured, json.loads(file.read_text()))
    kinds = {table.kind for table in measured.times.machine.collectives}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "shift"}
    assert measured.num_processes == num_measuring()
    plain = measured.times.plain
    assert plain is not None and plain.single_s > 0
    assert {trial.zero for trial in measured.times.trials} == {0, 1, 2, 3}

    written = file.stat().st_mtime_ns
    _, out, _ = plan("tiny", *SMALL, "--measured", str(file))
    second = json.loads(out)
    assert file.stat().st_mtime_ns == written
    assert any("measured before" in note for note in second["notes"])
    assert second["plans"] == first["plans"]
    [ranked] = first["plans"]
    by_layout = {row["layout"]: row["seconds"] for row in ranked["layouts"]}
    assert by_layout["dp=2"]["compute"] > plain.single_s
    assert by_layout["dp=2"]["vote"] > 0

    code, _, err = plan("tiny", *SMALL, "--set", "microbatch=2", "--measured", str(file))
    assert code == 2 and "another recipe" in err and len(err.splitlines()) == 1


def test_a_broken_file_and_another_device_are_refused(plan: RunCommand, tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text("[]")
    code, _, err = plan("tiny", *SMALL, "--measured", str(file))
    assert code == 2 and "cannot be read" in err and len(err.splitlines()) == 1
    code, _, err = plan("tiny", *SMALL, "--device", "L4", "--measured", str(file))
    assert code == 2 and "leave out --device" in err and len(err.splitlines()) == 1
