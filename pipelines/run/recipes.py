"""Recipes: functions that return training settings; `load` finds them by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import (
    Parameter,
    isasyncgenfunction,
    isclass,
    iscoroutinefunction,
    isfunction,
    isgeneratorfunction,
    signature,
)
from types import MappingProxyType, ModuleType
from typing import Any

from pipelines.errors import UserError
from pipelines.hugging_face.recipe import PREFIX, finetune, hugging_face
from pipelines.loop.script import FileScript, Script, is_script, script_of
from pipelines.run.refusals import refuse_unknown_recipe
from pipelines.settings import (
    CustomModelSettings,
    DataSettings,
    ExpertsSettings,
    MlpSettings,
    OptimizerSettings,
    TrainSettings,
    TransformerSettings,
)
from pipelines.settings.overrides import similar_names
from pipelines.settings.recipe import Recipe
from pipelines.settings.script_file import ScriptFile, file_and_function, module_at
from pipelines.settings.user_code import described, user_code_errors

RecipeLike = str | TrainSettings | Recipe | Callable[..., Any]
"""A recipe, or a name or function that gives one; see `load`."""

CUSTOM_MODEL = CustomModelSettings()
SYNC_EACH = False
"""For models this small, keeping whole gradients costs less than reducing in every backward."""


def tiny() -> TrainSettings:
    """Test size: 0.1 M parameters, steps of a few tens of milliseconds on a CPU."""
    return TrainSettings(
        model=TransformerSettings(dim=48, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=96),
        data=DataSettings(seq_len=32),
        optimizer=OptimizerSettings(lr=3e-3, warmup_steps=5, decay_steps=100),
        batch=12,
        microbatch=1,
        steps=60,
        sync_each_microbatch=SYNC_EACH,
    )


def tiny_moe() -> TrainSettings:
    """Test size with a mixture of experts: `tiny`, but each token uses two experts of four and a
    shared one."""
    settings = tiny()
    experts = ExpertsSettings(num_experts=4, top_k=2, hidden_dim=32, shared_hidden_dim=32)
    model = settings.model.model_copy(update={"experts": experts})
    return settings.model_copy(update={"model": model})


def byte_lm() -> TrainSettings:
    """A byte-level language model of 3 M parameters; its loss falls within two minutes on two
    CPU cores. A batch is 24 microbatches, which 2, 3, 4, 6 or 8 workers divide evenly."""
    return TrainSettings(
        model=TransformerSettings(),
        data=DataSettings(seq_len=128),
        optimizer=OptimizerSettings(lr=2e-3, warmup_steps=20, decay_steps=400),
        batch=24,
        microbatch=1,
        steps=200,
        eval_every=100,
        sync_each_microbatch=SYNC_EACH,
    )


def mlp() -> TrainSettings:
    """A multi-layer perceptron of 2.1 M parameters on random vectors, for benchmarks."""
    return TrainSettings(
        model=MlpSettings(),
        optimizer=OptimizerSettings(lr=1e-3),
        batch=64,
        microbatch=8,
        steps=100,
        sync_each_microbatch=SYNC_EACH,
    )


RECIPES: dict[str, Callable[[], TrainSettings]] = {
    recipe.__name__: recipe for recipe in (tiny, tiny_moe, byte_lm, mlp, finetune)
}


def load(
    recipe: RecipeLike, arguments: Mapping[str, Any] = MappingProxyType({})
) -> TrainSettings | Recipe | Script:
    """The settings, recipe or script that `recipe` stands for.

    A name is one of `RECIPES`, `hf:` and a folder or `config.json`, `path/to/file.py:function`,
    `module:function`, or `path/to/file.py`, a script that calls `current_run`. A function is called
    with `arguments`; settings and recipes are returned
    as they are. Raises `UserError` if there is no such recipe, or it gives another type.
    """
    if isinstance(recipe, str) and recipe.startswith(PREFIX):
        return hugging_face(recipe.removeprefix(PREFIX))
    value: Any = _named(recipe) if isinstance(recipe, str) else recipe
    if arguments:
        value = _with_arguments(recipe, value, arguments)
    verb = "is"
    if callable(value):
        is_named = isinstance(recipe, str)
        with user_code_errors(f"recipe {recipe}") if is_named else nullcontext():
            _refuse_other_kind(recipe, value)
            if is_script(value):
                return script_of(value)
            _refuse_missing_arguments(recipe, value)
            verb, value = "returns", value()
    if isinstance(value, Recipe):
        return with_custom_model(value)
    if not isinstance(value, TrainSettings):
        advice = "; a custom training loop has one parameter, the run" if value is None else ""
        raise UserError(
            f"recipe {name_of(recipe)}: {verb} {type(value).__name__}, not TrainSettings or a "
            f"Recipe{advice}"
        )
    return value


def load_shipped(file: ScriptFile, settings: TrainSettings) -> Recipe | Script:
    """The recipe or script of a file that was sent to this process, which runs it."""
    place, function = file_and_function(name := file.place)
    sys.argv = [place, *file.argv[1:]]  # also for functions that read it later
    value: Any = _from_module(name, place, function)
    if file.arguments:
        value = _with_arguments(name, value, file.arguments)
    if is_script(value):
        return Script(value, settings)
    loaded = load(value)
    assert isinstance(loaded, Recipe), f"{name} is no recipe of a custom model on this worker"
    return loaded


def _refuse_other_kind(recipe: RecipeLike, value: Any) -> None:
    """Raises `UserError` for what is called, but does not run as a recipe or a loop does."""
    kind = "a class" if isclass(value) else None
    kind = "an async function" if iscoroutinefunction(value) else kind
    if isgeneratorfunction(value) or isasyncgenfunction(value):
        kind = "a generator, since it has `yield`"
    if kind is not None:
        raise UserError(
            f"recipe {name_of(recipe)}: {described(value)} is {kind}: give a plain function"
        )


def _refuse_missing_arguments(recipe: RecipeLike, function: Callable[..., Any]) -> None:
    """Raises `UserError` for a function with required arguments that are not given."""
    try:
        parameters = signature(function)
    except (TypeError, ValueError):
        return
    missing = [
        name
        for name, parameter in parameters.parameters.items()
        if parameter.default is Parameter.empty
        and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    if not missing:
        return
    others = ", ".join(missing[1:])
    raise UserError(
        f"recipe {name_of(recipe)}{parameters}: only the first argument can be filled, with the "
        f"run of a custom training loop: give {others} a default, or a value in "
        f"ElasticTrainer(recipe_config=...)"
    )


def _with_arguments(recipe: RecipeLike, function: Any, arguments: Mapping[str, Any]) -> Any:
    name = f"recipe {name_of(recipe)}"
    if not callable(function):
        raise UserError(f"{name}: only a function takes arguments ({', '.join(arguments)})")
    try:
        signature(function).bind_partial(**arguments)
    except TypeError as error:
        raise UserError(f"{name}{signature(function)}: {error}") from None
    return partial(function, **arguments)


def name_of(recipe: RecipeLike) -> str:
    """The recipe's name in messages, in files and in names of runs."""
    if isinstance(recipe, str):
        return recipe
    if isinstance(recipe, TrainSettings):
        return recipe.model.kind
    named = recipe.model if isinstance(recipe, Recipe) else recipe
    if not hasattr(named, "__qualname__"):
        return type(named).__qualname__
    return f"{named.__module__}:{named.__qualname__}"


def _named(name: str) -> Callable[..., Any]:
    refuse_unknown_recipe(name)
    place, function = file_and_function(name)
    return _from_module(name, place, function) if place or ":" in name else RECIPES[name]


def with_custom_model(recipe: Recipe) -> Recipe:
    """The recipe with the settings of a custom model; settings without effect have their
    defaults."""
    update = {"model": CUSTOM_MODEL, "data": DataSettings(), "optimizer": OptimizerSettings()}
    return replace(recipe, settings=recipe.settings.model_copy(update=update))


def _from_module(name: str, place: str, function: str) -> Callable[..., Any]:
    is_file = place.endswith(".py")
    if name == place:
        return FileScript(place)
    if not function or (not is_file and not all(p.isidentifier() for p in place.split("."))):
        raise UserError(f"recipe {name}: write path/to/file.py:function or module:function")
    module = module_at(f"recipe {name}", place)
    recipe = getattr(module, function, None)
    if recipe is not None and not callable(recipe):
        raise UserError(
            f"recipe {name}: '{function}' is {type(recipe).__name__}, not a function; name a "
            "function that returns it"
        )
    if recipe is None:
        names = [key for key, value in vars(module).items() if _is_defined_in(module, value)]
        raise UserError(
            f"recipe {name}: {place} has no function '{function}'; {similar_names(function, names)}"
        )
    function_of_user: Callable[..., Any] = recipe
    return function_of_user


def _is_defined_in(module: ModuleType, value: object) -> bool:
    return isfunction(value) and value.__module__ == module.__name__
