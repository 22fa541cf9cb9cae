"""Unusable recipes: one line with the place in the user's file, exit code 2."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from ray.train import RunConfig
from test_bad_input import MAX_REFUSAL_S, expect_refusal
from torch import nn
from torch.utils.data import TensorDataset

from pipelines.api import ElasticTrainer
from pipelines.cli import main
from pipelines.errors import UserError
from pipelines.settings import user_code
from pipelines.settings.recipe import Recipe

PREAMBLE = """
import torch
from torch import nn
from pipelines.settings.recipe import Recipe


class NoLength:
    def __getitem__(self, index):
        return torch.zeros(4)


class Samples(NoLength):
    def __len__(self):
        return 8


class Raising(Samples):
    def __getitem__(self, index):
        raise KeyError("sample \\ud800")


class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.weight.register_hook(lambda gradient: gradient * 2)


class Turned(nn.Linear):
    def __init__(self, persistent):
        super().__init__(4, 4)
        self.register_buffer("turn", torch.ones(2) * 1j, persistent=persistent)
        if not persistent:
            self.phase = nn.Parameter(torch.ones(2) * 1j)


class Extra(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def get_extra_state(self):
        return {"number": 1}


class Empty(nn.Module):
    def forward(self, batch):
        return batch


def make_recipe(model=lambda: nn.Linear(4, 4), data=Samples, optimizer=None):
    def loss(model, batch):
        return model(batch).pow(2).mean()
    sgd = lambda named: torch.optim.SGD([tensor for _, tensor in named], lr=0.1)
    return Recipe(model=model, loss=loss, optimizer=optimizer or sgd, data=data)
"""
FILES = {
    "a syntax error": ("def custom(:\n    pass\n", "line 1: SyntaxError: invalid syntax"),
    "no Python": ("\0\0", "SyntaxError"),
    "a missing import": ("\nimport nosuch\n", "line 2: ModuleNotFoundError: No module named"),
    "a missing name": ("from pipelines.run.recipes import nosuch\n", "line 1: ImportError"),
    "an end of the process": ("raise SystemExit(0)\n", "line 1: SystemExit: 0"),
    "an empty file": ("", "no function 'custom'; there is none"),
    "another function": ("def mine():\n    pass\n", "no function 'custom'; there are: mine"),
}
RECIPES = {
    "a dataset without a length": ("make_recipe(data=NoLength)", "NoLength, which has no __len__"),
    "a dataset that raises": ("make_recipe(data=Raising)", "KeyError: 'sample \\ud800'"),
    "a model without parameters": ("make_recipe(model=Empty)", "Empty has no trainable parameters"),
    "a model that raises": ("make_recipe(model=lambda: 1 / 0)", "ZeroDivisionError"),
    "a model that is not a module": ("make_recipe(model=lambda: 5)", "int, not an nn.Module"),
    "a hook on a gradient": ("make_recipe(model=Hooked)", "weight has a hook on its gradient"),
    "extra state": ("make_recipe(model=Extra)", "the model's Extra has get_extra_state()"),
    "a complex buffer": ("make_recipe(model=lambda: Turned(True))", "buffer turn is complex"),
    "a complex parameter": ("make_recipe(model=lambda: Turned(False))", "phase is complex, which"),
    "an optimizer that raises": ("make_recipe(optimizer=lambda named: 1 / 0)", "ZeroDivisionError"),
    "another argument": ("Recipe(modle=1)", "unexpected keyword argument 'modle'"),
    "nothing instead of a recipe": ("None", "NoneType, not TrainSettings or a Recipe"),
    "an end of the process": ("exit(7)", "SystemExit: 7"),
}


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a recipe; a later refusal would let Ray start a cluster."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    return tmp_path / "mine.py"


def refuse_recipe(capsys: pytest.CaptureFixture[str], recipe_file: Path) -> str:
    started = time.process_time()
    line = expect_refusal(
        capsys, "train", f"{recipe_file}:custom", "--storage", str(recipe_file.parent / "runs")
    )
    assert time.process_time() - started < MAX_REFUSAL_S
    assert "importlib" not in line and "pipelines/" not in line.partition("ImportError")[0]
    return line


@pytest.mark.parametrize("name", FILES)
def test_file_without_the_recipe_function_is_refused(name: str, recipe_file: Path, capsys) -> None:
    text, message = FILES[name]
    recipe_file.write_text(text)
    assert message in refuse_recipe(capsys, recipe_file)


@pytest.mark.parametrize("name", RECIPES)
def test_unusable_recipe_is_refused(name: str, recipe_file: Path, capsys) -> None:
    expression, message = RECIPES[name]
    recipe_file.write_text(f"{PREAMBLE}\n\ndef custom():\n    return {expression}\n")
    assert message in refuse_recipe(capsys, recipe_file)


def test_traceback_of_a_recipe_shows_only_frames_of_the_user(recipe_file: Path, capsys) -> None:
    """No frames of importlib or of this project are shown."""
    recipe_file.write_text(
        "def inner():\n    raise ValueError('boom')\n\n\ndef custom():\n    inner()\n"
    )
    sys.argv = ["elastic", "train", f"{recipe_file}:custom"]
    with pytest.raises(SystemExit) as exited:
        main()
    *frames, line = capsys.readouterr().err.splitlines()
    assert exited.value.code == 2
    assert line == f"elastic: recipe {recipe_file}:custom: {recipe_file}, line 2: ValueError: boom"
    assert [frame for frame in frames if "File " in frame] == [
        f'  File "{recipe_file}", line 6, in custom',
        f'  File "{recipe_file}", line 2, in inner',
    ]


INSTALLED = """
def big():
    return narrow(0)


def narrow(width):
    raise ValueError(f"width {width}")


def end():
    raise SystemExit(0)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in a folder that counts as a folder of installed packages."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(user_code, "_INSTALLED", (*user_code._INSTALLED, f"{tmp_path}/"))
    file = tmp_path / "installed_recipes.py"
    file.write_text(INSTALLED)
    yield file
    sys.modules.pop("installed_recipes", None)


def test_installed_recipe_that_raises_is_refused_with_its_line(installed: Path, capsys) -> None:
    """The line, and before it only the frames of the package."""
    sys.argv = ["elastic", "train", "installed_recipes:big"]
    with pytest.raises(SystemExit) as exited:
        main()
    *frames, line = capsys.readouterr().err.splitlines()
    assert exited.value.code == 2
    assert line == (
        f"elastic: recipe installed_recipes:big: {installed}, line 7: ValueError: width 0"
    )
    assert [frame for frame in frames if "File " in frame] == [
        f'  File "{installed}", line 3, in big',
        f'  File "{installed}", line 7, in narrow',
    ]


@pytest.mark.parametrize(
    ("recipe", "message"), [("installed_recipes:end", "SystemExit: 0"), ("sys:exit", "SystemExit")]
)
def test_installed_recipe_that_exits_the_process_is_refused(
    recipe: str, message: str, installed: Path, capsys
) -> None:
    line = expect_refusal(capsys, "train", recipe, "--storage", str(installed.parent / "runs"))
    assert line.startswith(f"elastic: recipe {recipe}: ") and line.endswith(message)


def test_recipe_object_that_cannot_be_sent_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later refusal would let Ray start a cluster."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    lock = threading.Lock()
    data = TensorDataset(torch.ones(8, 4))
    recipe = Recipe(
        model=lambda: nn.Linear(4, 4),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda named: torch.optim.SGD([tensor for _, tensor in named], lr=0.1),
        data=lambda: (lock, data)[1],
    )
    storage = RunConfig(storage_path=str(tmp_path))
    with pytest.raises(UserError, match="the recipe's data uses lock, of type lock, which"):
        ElasticTrainer(recipe, run_config=storage, verbose=0).fit()
