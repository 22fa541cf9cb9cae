"""A run with other training settings, or of another version, is refused before anything starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.run.plan import TrainRequest, make_plan, store_recipe

FLOAT64 = ("dtype=float64",)


def test_other_training_settings_are_refused_in_one_line_and_the_recipe_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = TrainRequest("tiny", "run", str(tmp_path), "1", None, 5, None, "random", FLOAT64)
    store_recipe(make_plan(request, num_gpus=0))
    before = (tmp_path / "run" / "recipe.json").read_text()
    train = ["elastic", "train", "tiny", "--storage", str(tmp_path), "--run-name", "run"]
    train += ["--data", "random", "--workers", "1", "--set", "dtype=float64"]
    monkeypatch.setattr(sys, "argv", [*train, "--steps", "9", "--set", "optimizer.lr=0.5"])
    with pytest.raises(SystemExit) as exited:
        main()
    [line] = capsys.readouterr().err.splitlines()
    assert exited.value.code == 2
    assert "optimizer.lr: 0.003 -> 0.5" in line
    assert (tmp_path / "run" / "recipe.json").read_text() == before


@pytest.mark.parametrize("command", ["train", "export", "doctor"])
def test_a_run_of_another_recipe_format_is_refused_in_one_line(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = TrainRequest("tiny", "run", str(tmp_path), "1", None, 5, None, "random")
    store_recipe(make_plan(asked, num_gpus=0))
    file = tmp_path / "run" / "recipe.json"
    stored = json.loads(file.read_text())
    assert stored["format"] == 2
    flat = {"checkpoint_every": "auto", **stored["settings"]}
    before = json.dumps({**stored, "format": 1, "settings": flat})
    file.write_text(before)
    train = ["tiny", "--run-name", "run", "--data", "random", "--workers", "1"]
    arguments = train if command == "train" else ["run"]
    monkeypatch.setattr(sys, "argv", ["elastic", command, *arguments, "--storage", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert "recipe.json has format 1, this version reads 2: choose another --run-name" in line
    assert file.read_text() == before
