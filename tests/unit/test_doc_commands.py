"""The command lines of README.md and docs/*.md that start no worker run here, as written.

`tests/ray/test_documented_runs.py` runs those that train; `doc_not_run.py` lists the others.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_folder import make_folder
from doc_not_run import reason, unused
from doc_pages import COMMANDS, ROOT, Command
from rich.console import Console
from written_runs import WrittenRun

from pipelines.cli import main
from pipelines.run.in_process import train_in_process
from pipelines.run.plan import TrainRequest

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
NEED_A_CHECKPOINT = ("export", "doctor")
"""Commands about a run that read its checkpoints; `status` and `logs` read only its lines."""

LOCAL = [c for c in COMMANDS if c.arguments and not c.needs_workers and not reason(c)]
TRAINING = [c for c in COMMANDS if c.needs_workers and "train" in c.words and not reason(c)]
OTHERS = [c for c in COMMANDS if c.arguments is None and not reason(c)]


def names_a_run(command: Command) -> bool:
    return run_named_by(command) in ("demo", "tuned")


def run_named_by(command: Command) -> str:
    """The second word, or that of `--from-run`."""
    words = [*(command.arguments or ()), "", ""]
    return words[words.index("--from-run") + 1] if "--from-run" in words else words[1]


def needs_checkpoint(command: Command) -> bool:
    return names_a_run(command) and command.arguments[0] in NEED_A_CHECKPOINT


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run on text with a checkpoint at step 200, the last of `byte_lm`."""
    storage = tmp_path_factory.mktemp("trained")
    (storage / "text.txt").write_text("a sentence\n" * 2000)
    request = TrainRequest("tiny", "demo", str(storage), steps=200, data=str(storage / "text.txt"))
    assert train_in_process(request, Console(quiet=True)) == 0
    yield storage / "demo"


def write_run(path: Path) -> None:
    """A run of four workers that no driver drives any more."""
    run = WrittenRun(path, now=time.time() - 60)
    (path / "recipe.json").write_text("{}")
    run.start(4, steps=200)
    for _ in range(3):
        run.commit()


def prepare(folder: Path, command: Command, request: pytest.FixtureRequest) -> None:
    make_folder(folder, command.page)
    if needs_checkpoint(command):
        shutil.copytree(request.getfixturevalue("trained"), folder / "runs" / run_named_by(command))
    elif names_a_run(command):
        write_run(folder / "runs" / run_named_by(command))


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run `elastic` in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["elastic", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, id=c.place, marks=[pytest.mark.slow] if needs_checkpoint(c) else [])
        for c in LOCAL
    ],
)
def test_the_command_line_succeeds(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    prepare(tmp_path, command, request)
    monkeypatch.chdir(tmp_path)
    for name, value in command.environment.items():
        monkeypatch.setenv(name, value)
    code = call(monkeypatch, *command.arguments)
    printed = capsys.readouterr()
    expected = (0, None, 1) if command.arguments == ["doctor"] else (0, None)  # 1: a check failed
    assert code in expected, printed.out + printed.err
    assert printed.out.strip()


@pytest.mark.parametrize("command", TRAINING, ids=lambda command: command.place)
def test_the_plan_of_the_command_line_is_accepted(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Recipe, data, settings and layout, by `--dry-run`; on Ray the command line runs in full."""
    make_folder(tmp_path, command.page)
    monkeypatch.chdir(tmp_path)
    arguments = [word for word in command.arguments or () if word != "--in-process"]
    assert call(monkeypatch, *arguments, "--dry-run") in (0, None)
    assert "step" in capsys.readouterr().out


@pytest.mark.parametrize("command", OTHERS, ids=lambda command: command.place)
def test_the_command_line_of_another_program_succeeds(command: Command) -> None:
    """In the project's folder, where the pages say that they run."""
    words = [sys.executable if word == "python" else word for word in command.words]
    ended = subprocess.run(
        words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout or "make_phases" in command.text


def test_each_command_line_is_run_or_has_a_reason() -> None:
    """A new one is run by this file or by `tests/ray/test_documented_runs.py`, or this fails."""
    known = ("python", "grep")
    strange = [c.place for c in OTHERS if c.words[0] not in known]
    assert not strange, "run these, or give the reason in tests/doc_not_run.py"
    assert not unused(), "no command line begins like this any more"
    assert len(LOCAL) >= 15


def test_no_command_line_has_a_placeholder() -> None:
    """Of those that are run: a reader can type them as they are."""
    words = {word for c in COMMANDS if not reason(c) for word in c.words}
    assert not [word for word in words if word.isupper() and len(word) > 2]
