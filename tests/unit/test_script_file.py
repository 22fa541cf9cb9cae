"""A script's file is run in each process as `python FILE` runs it, also where it does not exist."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.errors import UserError
from pipelines.loop import current_run
from pipelines.loop.declaration import NotDeclared
from pipelines.loop.state.errors import LoopMisused
from pipelines.run.recipes import load
from pipelines.run.refusals import give_words
from pipelines.settings.script_file import ScriptFile, run_again, run_file

pytestmark = pytest.mark.slow

SCRIPT = """
import argparse, threading
import torch
from torch import nn
from sibling import WIDTH
from package.part import PART

parser = argparse.ArgumentParser()
parser.add_argument("--scale", type=float, default=2.0)
ARGS = parser.parse_args()
LOCK = threading.Lock()  # cannot be pickled
torch.set_default_dtype(torch.float64)
nn.functional.gelu = nn.functional.relu


def train(run, depth=1):
    with LOCK:
        model = nn.Linear(WIDTH, PART)
    optimizer = torch.optim.SGD(model.parameters(), lr=ARGS.scale)
    data = torch.utils.data.TensorDataset(torch.randn(8, WIDTH))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for step in run.steps(4 * depth):
        raise AssertionError("no step is begun")


if __name__ == "__main__":
    raise SystemExit("the program itself is not run on workers")
"""
WORKER = """
import pickle, sys
import torch
from pipelines.run.program import TrainingProgram
file, settings = pickle.load(open(sys.argv[1], "rb"))
program = TrainingProgram(settings, recipe=file, device="cpu")
declared = program.loop.declaration
assert torch.get_default_dtype() == torch.float64
assert torch.nn.functional.gelu is torch.nn.functional.relu
assert tuple(declared.model.weight.shape) == (3, 5), declared.model
print("lr", declared.optimizer_factory.values.kept[0], "steps", declared.counts.num_steps)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "here").mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "sibling.py").write_text("WIDTH = 5\n")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "part.py").write_text("PART = 3\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_file_does_when_it_is_run_has_its_effect_on_a_worker(
    is_there: bool, folder: Path, tmp_path: Path
) -> None:
    command = (
        "import pickle, sys\n"
        "from pipelines.run.recipes import load\n"
        "from pipelines.settings.script_file import ScriptFile\n"
        f"name = {str(folder / 'script.py:train')!r}\n"
        "arguments = {'depth': 2}\n"
        "settings = load(name, arguments).settings.model_dump(mode='json')\n"
        "file = ScriptFile.of(name, arguments)\n"
        f"pickle.dump((file, settings), open({str(tmp_path / 'sent')!r}, 'wb'))\n"
    )
    subprocess.run([sys.executable, "-c", command], check=True, timeout=120)
    file, _ = pickle.loads((tmp_path / "sent").read_bytes())
    assert set(file.sources) == {
        "script.py",
        "sibling.py",
        "package/__init__.py",
        "package/part.py",
    }
    if not is_there:
        folder.rename(tmp_path / "elsewhere")
    (child := tmp_path / "worker.py").write_text(WORKER)
    (temporary := tmp_path / "temporary").mkdir()
    ended = subprocess.run(
        [sys.executable, str(child), str(tmp_path / "sent")],
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.stdout == "lr 2.0 steps 8\n", ended.stderr
    assert not list(temporary.glob("elastic-*")), "the written files are removed at the end"


def test_functions_without_a_file_of_their_own_are_sent_themselves() -> None:
    assert ScriptFile.of(lambda run: None, {}) is None
    assert ScriptFile.of("pipelines.run.recipes:tiny", {}) is None
    assert ScriptFile.of(load("tiny"), {}) is None


def test_words_behind_two_dashes_are_the_arguments_of_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["elastic", "train"])
    (folder / "words.py").write_text("import sys\nARGV = list(sys.argv)\ndef recipe():\n    pass\n")
    file = str(folder / "words.py")
    assert [file] == run_file(Path(file)).ARGV, "not those of this program"
    monkeypatch.chdir(folder)
    give_words("./words.py:recipe", ["--lr", "3e-4"])
    module = run_file(Path("./words.py"))
    assert module.ARGV == ["./words.py", "--lr", "3e-4"]
    run_again(module)
    assert module.ARGV == ["./words.py", "--lr", "3e-4"]
    give_words(f"{file}:recipe", ["--lr", "3e-4"])
    assert [file, "--lr", "3e-4"] == run_file(Path(file)).ARGV
    shipped_file = ScriptFile.of(f"{file}:recipe", {})
    assert shipped_file is not None and shipped_file.argv == (file, "--lr", "3e-4")
    with pytest.raises(UserError, match=r"--lr: only path/to/file.py and path/to/file.py:fun"):
        give_words("tiny", ["--lr"])


def test_program_that_starts_a_run_without_a_guard_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker runs the file, and would start a run of its own."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    program = "from pipelines.api import ElasticTrainer\nElasticTrainer('tiny', verbose=0).fit()\n"
    (folder / "unguarded.py").write_text(program)
    with pytest.raises(UserError, match=r"put this under `if __name__ == \"__main__\":`"):
        run_file(folder / "unguarded.py")


def test_file_as_a_whole_is_a_script_that_asks_for_its_run(tmp_path: Path) -> None:
    with pytest.raises(LoopMisused, match="current_run: no run executes this file: start it by"):
        current_run()
    with pytest.raises(UserError, match=r"recipe absent.py: there is no file absent.py"):
        load("absent.py")
    (file := tmp_path / "script.py").write_text(
        "from pipelines.loop import current_run\n"
        "assert __name__ == '__main__'\n"
        "run = current_run()\n"
    )
    with pytest.raises(NotDeclared, match=r"script.py: ended without a step"):
        load(str(file))
    shipped = ScriptFile.of(str(file), {})
    assert shipped is not None and shipped.place == str(file) and not shipped.function
    with pytest.raises(UserError, match="unexpected keyword"):
        load(str(file), {"lr": 0.1})
