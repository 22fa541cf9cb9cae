"""A script with a custom training loop, turned into settings and a recipe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from actors.runtime.program import Evaluation
from pipelines.loop.declaration import Declaration, NotDeclared
from pipelines.loop.modules.model_copies import copy_models
from pipelines.loop.prepared.called_module import CalledModels
from pipelines.loop.prepared.file_models import with_file_models
from pipelines.loop.prepared.refusals import refuse_unkeepable
from pipelines.loop.run import Run
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.step import Step
from pipelines.settings import CustomModelSettings, TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.settings.script_file import run_as_main
from pipelines.settings.user_code import described
from pipelines.training.custom.modules.custom_module import seeded

DTYPES: dict[torch.dtype, Literal["float64"]] = {torch.float64: "float64"}
"""The run's dtype by that of the model's parameters; float32 for all others."""


@dataclass(frozen=True)
class Script:
    """A script's function, which prepares its objects and loops over `run.steps`.

    `settings` are those that the loop declares, and defaults for the others.
    """

    function: Callable[[Run], None]
    settings: TrainSettings


class FileScript:
    """A file that as a whole is the script; it gets its run from `current_run`."""

    def __init__(self, file: str) -> None:
        self.__name__ = file

    def __call__(self, run: Run) -> None:
        _present.run = run
        try:
            run_as_main(Path(self.__name__))
        finally:
            _present.run = None


class _Present(threading.local):
    run: Run | None = None


_present = _Present()


def current_run() -> Run:
    """The run of a script without a function of its own: `elastic train FILE.py` executes the file
    as a whole, on each worker. Raises `LoopMisused` elsewhere."""
    if _present.run is None:
        raise LoopMisused(
            "current_run: no run executes this file: start it by `elastic train FILE.py`"
        )
    return _present.run


class _Declared(BaseException):
    """Unwinds a script once its declaration is known."""

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration


def is_script(function: Callable[..., Any]) -> bool:
    """Whether a function is a script: it has exactly one parameter without a default, the run."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(parameter.default is Parameter.empty for parameter in parameters) == 1


def script_of(function: Callable[[Run], None]) -> Script:
    """Run a function up to its first step, and unwind it there.

    Raises `UserError` if it ends before, and what the function raises.
    """
    try:
        with seeded(TrainSettings().seed):
            run = Run(_declare, CalledModels(), lambda: Evaluation(None), prints_early=True)
            with_file_models(function)(run)
    except _Declared as declared:
        return Script(function, settings_of(declared.declaration))
    what = described(function)
    raise NotDeclared(f"{what}: ended without a step; loop over run.steps(num_steps)")


def settings_of(declaration: Declaration) -> TrainSettings:
    """The settings that a script's loop declares."""
    first = next(declaration.model.parameters(), torch.empty(0))
    return TrainSettings(
        model=CustomModelSettings(),
        batch=declaration.batch,
        updates_per_batch=declaration.counts.updates_per_batch,
        microbatch=declaration.source.microbatch,
        steps=declaration.counts.num_steps,
        reading=declaration.source.reading,
        dtype=DTYPES.get(first.dtype, "float32"),
    )


def recipe_of(declaration: Declaration, settings: TrainSettings) -> Recipe:
    """A recipe of what was declared, without the training passes, which the loop drives.

    Raises `LoopMisused` if the settings contradict the script.
    """
    declaration.states.refuse_other_number(settings.num_microbatches)
    evaluation, source = declaration.evaluation, declaration.source
    clipping = declaration.optimizer_factory.clipping
    return Recipe(
        model=partial(copy_models, declaration.called.declared),
        loss=_no_held_out_data,
        optimizer=declaration.optimizer_factory.build,
        max_grad_norm=clipping.max_norm,
        max_grad_value=clipping.max_value,
        data=lambda: source.dataset,
        held_out=(lambda: evaluation.dataset) if evaluation else None,
        evaluation=evaluation.losses if evaluation else None,
        metrics=evaluation.metrics if evaluation else {},
        collate=source.collate,
        begin_reader=source.begin_reader,
        plan=declaration.plan,
        tp_divides=declaration.tp_divides,
        sequence=declaration.sequence,
        experts=declaration.experts,
        settings=settings,
    )


def _declare(declaration: Declaration) -> Iterator[Step]:
    refuse_unkeepable(
        declaration.optimizer_factory, declaration.model, declaration.counts.num_steps
    )
    raise _Declared(declaration)


def _no_held_out_data(model: nn.Module, batch: Any) -> NoReturn:
    raise LoopMisused(
        "eval_every: the script has declared no held-out data: call run.evaluation(dataset, "
        "losses) before its loop, or set eval_every=0"
    )
