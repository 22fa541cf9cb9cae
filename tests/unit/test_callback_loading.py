"""What is a callback, and the refusals in one line before anything is launched."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ray.train import RunConfig
from test_bad_input import expect_refusal

from pipelines.api import Callback, ElasticTrainer, UserError
from pipelines.callbacks import TensorBoardCallback, WandbCallback
from pipelines.callbacks.loading import load_callbacks

FILE = """
import sys
from pipelines.callbacks import Callback


class Mine(Callback):
    def on_step(self, step):
        pass


class Misspelled(Callback):
    def on_steps(self, step):
        pass


class WithoutArgument(Callback):
    def on_step(self):
        pass


class Raising(Callback):
    def __init__(self):
        raise KeyError("no such thing")


class Exiting(Callback):
    def __init__(self):
        sys.exit(3)


class WithArgument(Callback):
    def __init__(self, folder):
        self.folder = folder


class NoCallback:
    pass


def make():
    return WithArgument("folder")


instance = WithArgument("another folder")
number = 7
"""
REFUSALS = {
    "Mien": "has no 'Mien'; similar: Mine",
    "NoCallback": "gives NoCallback, not a callback; derive a class from",
    "number": "is int, not a callback",
    "Misspelled": "no event calls on_steps; similar: on_step",
    "WithoutArgument": "on_step() must take one argument",
    "Raising": "line 23: KeyError: 'no such thing'",
    "Exiting": "line 28: SystemExit: 3",
    "WithArgument": "(folder): missing a required argument: 'folder'; give it a default, or name",
}
NAMES = {
    "nosuch.py:Mine": "there is no file nosuch.py",
    "nosuch_module:Mine": "there is no module nosuch_module",
    "Mine": "write path/to/file.py:NAME or module:NAME",
    "mine.py:": "write path/to/file.py:NAME or module:NAME",
    "": "--callback",
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("RAY_ADDRESS", "local")
    file = tmp_path / "my_callbacks.py"
    file.write_text(FILE)
    return file


def test_callback_is_a_class_a_factory_or_an_instance(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Callback()
    given = [f"{file}:Mine", f"{file}:make", f"{file}:instance", mine, Callback]
    named = load_callbacks(given)
    names = ["Mine", "WithArgument", "WithArgument-2", "Callback", "Callback-2"]
    assert [each.name for each in named] == names
    assert named[3].callback is mine and type(named[4].callback) is Callback
    assert (named[1].callback.folder, named[2].callback.folder) == ("folder", "another folder")
    monkeypatch.syspath_prepend(file.parent)
    [of_module] = load_callbacks(["my_callbacks:Mine"])
    assert isinstance(of_module.callback, Callback)
    del sys.modules["my_callbacks"]


def refuse(capsys: pytest.CaptureFixture[str], storage: Path, *options: str) -> str:
    train = ("train", "tiny", "--data", "random", "--storage", str(storage), *options)
    line = expect_refusal(capsys, *train)
    assert not storage.exists()
    return line


@pytest.mark.parametrize("name", REFUSALS)
def test_object_that_is_no_callback_is_refused_in_one_line(name: str, file: Path, capsys) -> None:
    line = refuse(capsys, file.parent / "runs", "--callback", f"{file}:{name}")
    assert line.startswith(f"elastic: --callback {file}:{name}") and REFUSALS[name] in line


@pytest.mark.parametrize("name", NAMES)
def test_name_of_no_callback_is_refused_in_one_line(name: str, file: Path, capsys) -> None:
    line = refuse(capsys, file.parent / "runs", "--callback", name)
    assert NAMES[name] in line


@pytest.mark.parametrize("option", ["--in-process", "--dry-run"])
def test_other_ways_to_train_refuse_it_too(option: str, file: Path, capsys) -> None:
    line = refuse(capsys, file.parent / "runs", option, "--callback", f"{file}:Nosuch")
    assert "has no 'Nosuch'" in line


def test_detached_run_has_no_process_to_call_them(file: Path, capsys) -> None:
    line = refuse(capsys, file.parent / "runs", "--detach", "--callback", f"{file}:Mine")
    assert "--detach" in line and "drop one" in line


def test_argument_of_python_is_refused_likewise(tmp_path: Path) -> None:
    for callbacks, message in (([7], "callbacks: int: is int"), (["x.py:Y"], "no file x.py")):
        run = RunConfig(storage_path=tmp_path / "runs")
        trainer = ElasticTrainer("tiny", data="random", run_config=run, callbacks=callbacks)
        for start_run in (trainer.fit, trainer.start):
            with pytest.raises(UserError, match=message) as error:
                start_run()
            assert "--" not in str(error.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "package"), [(TensorBoardCallback, "tensorboard"), (WandbCallback, "wandb")]
)
def test_missing_package_is_refused_with_its_installation(
    kind: type[Callback], package: str, file: Path, capsys
) -> None:
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    name = f"pipelines.callbacks:{kind.__name__}"
    line = refuse(capsys, file.parent / "runs", "--callback", name)
    assert f"{kind.__name__} needs the package {package}" in line
    assert line.endswith(f"pip install {package}")
