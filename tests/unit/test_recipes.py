"""Recipes are found by name, file or module, and have their documented size."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from pipelines.errors import UserCodeFailed, UserError
from pipelines.run.program import make_workload
from pipelines.run.recipes import RECIPES, byte_lm, load, mlp, tiny, tiny_moe
from pipelines.settings import DataSettings, TrainSettings
from pipelines.training.workload.state import state_specs

CUSTOM = """
from pipelines.run.recipes import tiny

def custom():
    return tiny().model_copy(update={"seed": 7})

def wrong():
    return 3
"""


def num_parameters(settings: TrainSettings) -> int:
    data = DataSettings(source="random")
    settings = settings.model_copy(update={"data": data, "eval_every": 0})
    specs = state_specs(make_workload(settings), settings)
    return sum(prod(spec.shape) for spec in specs if spec.kind == "parameter")


def test_recipes_have_their_documented_sizes() -> None:
    assert num_parameters(tiny()) < 300_000
    assert num_parameters(tiny_moe()) < 300_000
    assert 2_000_000 < num_parameters(byte_lm()) < 6_000_000
    assert 2_050_000 < num_parameters(mlp()) < 2_150_000


@pytest.mark.parametrize("name", RECIPES)
def test_batch_has_a_microbatch_for_each_of_eight_workers(name) -> None:
    assert load(name).num_microbatches >= 8


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_chooses_the_checkpoint_interval_automatically(name) -> None:
    assert load(name).checkpoint.every == "auto"


@pytest.mark.parametrize("num_workers", [2, 3, 4, 6, 8])
def test_default_batch_divides_evenly_among_usual_numbers_of_workers(num_workers) -> None:
    assert byte_lm().num_microbatches % num_workers == 0


def test_recipe_is_found_in_a_file_or_a_module(tmp_path, monkeypatch) -> None:
    (tmp_path / "custom_recipes.py").write_text(CUSTOM)
    assert load(f"{tmp_path / 'custom_recipes.py'}:custom").seed == 7
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("custom_recipes:custom").seed == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("byte_ml", "similar: byte_lm"),
        ("zzz", "there are: tiny, tiny_moe, byte_lm, mlp"),
        ("nowhere.py:custom", "there is no file nowhere.py"),
        ("no_such_module:custom", "there is no module no_such_module"),
        ("no.such.module:custom", "there is no module no.such.module"),
        ("{file}:custom_", "similar: custom"),
        ("{file}:wrong", "returns int, not TrainSettings"),
    ],
)
def test_missing_or_invalid_recipe_is_refused_in_one_line(tmp_path, name, message) -> None:
    file = tmp_path / "recipes_of_mine.py"
    file.write_text(CUSTOM)
    with pytest.raises(UserError) as error:
        load(name.format(file=file))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_import_error_inside_a_module_of_the_user_is_shown(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    with pytest.raises(UserCodeFailed, match=r"broken\.py, line 1: .*no_such_thing"):
        load(f"{tmp_path / 'broken.py'}:custom")
