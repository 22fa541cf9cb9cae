"""A script that owns its loop, as a recipe: what it declares before its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pipelines.loop.declaration import Declaration, NotDeclared
from pipelines.loop.errors import LoopMisused
from pipelines.loop.prepared import CalledModule
from pipelines.loop.run import Run
from pipelines.loop.step import Step
from pipelines.settings import CustomModelSettings, TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.custom.custom_module import seeded

DTYPES = {torch.float64: "float64"}
"""What is computed in, by what the model is made of; else float32."""


@dataclass(frozen=True)
class Script:
    """`function(run)` prepares what it trains with, and loops over `run.steps`.

    `settings` are what its loop asks for, and the defaults of all the rest.
    """

    function: Callable[[Run], None]
    settings: TrainSettings


class _Declared(BaseException):
    """Unwinds a script whose declaration is all that is wanted."""

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration


def is_script(function: Callable[..., Any]) -> bool:
    """Whether it wants a run: it has one parameter without a default."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(one.default is Parameter.empty for one in parameters) == 1


def script_of(function: Callable[[Run], None]) -> Script:
    """Run it up to its first step, and leave it there. Raises `UserError` if it never gets there,
    and what it raises."""
    part = CalledModule()
    try:
        with seeded(TrainSettings().seed):
            function(Run(_declare, part))
    except _Declared as declared:
        return Script(function, settings_of(declared.declaration))
    raise NotDeclared(
        f"{getattr(function, '__name__', function)}: it ended without a step; loop over "
        "run.steps(num_steps)"
    )


def settings_of(declaration: Declaration) -> TrainSettings:
    """What the script's loop asks for."""
    first = next(declaration.model.parameters(), torch.empty(0))
    return TrainSettings(
        model=CustomModelSettings(),
        batch=declaration.batch,
        microbatch=declaration.microbatch,
        steps=declaration.steps,
        dtype=DTYPES.get(first.dtype, "float32"),
    )


def recipe_of(declaration: Declaration, settings: TrainSettings) -> Recipe:
    """What was declared, but for the training passes, which are the loop's."""
    evaluation = declaration.evaluation
    return Recipe(
        model=partial(_copied, declaration.model),
        loss=_not_here,
        optimizer=declaration.optimising.build,
        schedule=declaration.optimising.rate,
        max_grad_norm=declaration.optimising.max_grad_norm,
        data=lambda: declaration.dataset,
        held_out=(lambda: evaluation.dataset) if evaluation else None,
        evaluation=evaluation.losses if evaluation else None,
        metrics=evaluation.metrics if evaluation else {},
        collate=declaration.collate,
        settings=settings,
    )


def _declare(declaration: Declaration) -> Iterator[Step]:
    raise _Declared(declaration)


def _copied(model: nn.Module) -> nn.Module:
    """The module as it was declared; its shapes alone where the default device is `meta`."""
    memo: dict[int, Tensor] = {}
    if torch.get_default_device().type == "meta":
        for parameter in model.parameters():
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied: nn.Module = deepcopy(model, memo)
    return copied


def _not_here(model: nn.Module, batch: Any) -> NoReturn:
    raise LoopMisused(
        "eval_every: the script has declared no held-out data: say run.evaluation(dataset, losses) "
        "before its loop, or set eval_every=0"
    )
