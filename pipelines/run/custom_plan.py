"""What is checked and written down of a recipe with a model of its own before a run begins."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipelines.loop.script import Script
from pipelines.run.program import TrainingProgram
from pipelines.settings import TrainSettings
from pipelines.settings.errors import UserError
from pipelines.settings.overrides import Given
from pipelines.settings.recipe import Recipe
from pipelines.training.custom.optimizer_checks import refuse_unfit
from pipelines.training.workload.state import build_on_meta, optimising_of, trained_dims
from pipelines.training.workload.workload import Workload

STATE_DIGEST, SOURCE = "state_digest", "source"
BROUGHT = ("model", "data", "optimizer", "init_from")
"""Settings that mean nothing where the recipe has its own."""
UNSAID = ("data", "optimizer")
"""Of these what would mislead whoever reads `recipe.json`."""


def refuse_brought(changes: Sequence[str | Given]) -> None:
    """Raises `UserError` for a change of what the recipe has brought itself."""
    for change in changes:
        key = change.key if isinstance(change, Given) else change.partition("=")[0]
        part = key.partition(".")[0]
        if part in BROUGHT:
            raise UserError(f"{key}: the recipe brings its own {part}; change it there")


def refuse_unfit_recipe(workload: Workload, settings: TrainSettings) -> None:
    """Raises `UserError` for what can be known to fail."""
    if settings.eval_every and not workload.num_held_out:
        raise UserError(
            f"eval_every={settings.eval_every}: the recipe has no held_out data; give it some, or "
            "--set eval_every=0"
        )
    for name in workload.metrics:
        if name == "loss" or not name.isidentifier():
            raise UserError(
                f"metrics: '{name}' is told as eval_{name}: name it in letters, digits and _, and "
                "not 'loss', which the held-out loss has"
            )
    module = build_on_meta(workload, settings)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(
            f"the model {type(module).__name__} has no parameters to train: give it layers that "
            "have some, and leave requires_grad on for them"
        )
    for name, parameter in module.named_parameters():
        if not parameter.ndim:
            raise UserError(
                f"the model's parameter {name} has no dims, and nothing of it could be sharded: "
                "make it of shape (1,)"
            )
    workload.blocks(module)
    refuse_unfit(optimising_of(workload, settings), trained_dims(module))


def notes_on(workload: Workload, settings: TrainSettings) -> tuple[str, ...]:
    """What whoever begins a run with such a recipe should know."""
    of, evaluated = workload.num_held_out, settings.eval_samples
    if not settings.eval_every or of <= evaluated:
        return ()
    return (
        f"evaluations take the first {evaluated} of {of} held-out samples; all: "
        f"--set eval_samples={of}",
    )


def identity(recipe: Recipe | Script, program: TrainingProgram) -> dict[str, Any]:
    """What `recipe.json` says of it: the settings that mean something, a digest of the names,
    shapes and dtypes of the state, and one of the file that its loss, or its loop, stands in."""
    settings = program.settings.model_dump(mode="json")
    specs = [(spec.name, spec.shape, spec.dtype) for spec in program.specs()]
    return {
        "settings": {key: value for key, value in settings.items() if key not in UNSAID},
        STATE_DIGEST: sha256(repr(specs).encode()).hexdigest(),
        SOURCE: _source_of(recipe),
    }


def changed_source(stored: dict[str, Any], now: dict[str, Any]) -> str | None:
    """A line, if the file of the recipe is not what it was when the run began."""
    before, after = stored.get(SOURCE), now.get(SOURCE)
    if not before or not after or before["sha256"] == after["sha256"]:
        return None
    return (
        f"{after['file']} has changed since the run began: the state fits, whether the maths is "
        "the same only you know"
    )


def _source_of(recipe: Recipe | Script) -> dict[str, str] | None:
    told = recipe.function if isinstance(recipe, Script) else recipe.loss
    try:
        file = inspect.getsourcefile(inspect.unwrap(told))
        content = Path(file).read_bytes() if file else None
    except (TypeError, OSError):  # one typed into a notebook has none
        return None
    return {"file": file, "sha256": sha256(content).hexdigest()} if file and content else None
