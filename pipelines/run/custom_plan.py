"""Checks of a recipe with a custom model before a run begins, and its record in recipe.json."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipelines.errors import UserError
from pipelines.loop.script import Script
from pipelines.loop.trial import try_body
from pipelines.run.program import TrainingProgram
from pipelines.settings.overrides import Given
from pipelines.settings.recipe import Recipe
from pipelines.training.custom.custom_workload import CustomWorkload
from pipelines.training.custom.optimizer_checks import refuse_other_state, refuse_unfit
from pipelines.training.workload.state import build_on_meta, optimizer_factory_of, trained_dims

STATE_DIGEST, SOURCE = "state_digest", "source"
BROUGHT = ("model", "data", "optimizer", "init_from")
"""Settings without effect, since a custom recipe supplies these parts itself."""
UNSAID = ("data", "optimizer")
"""Those of `BROUGHT` that `recipe.json` omits, because they would mislead a reader."""


def refuse_brought(changes: Sequence[str | Given]) -> None:
    """Raises `UserError` for a change of a part that the recipe supplies itself."""
    for change in changes:
        key = change.key if isinstance(change, Given) else change.partition("=")[0]
        part = key.partition(".")[0]
        if part in BROUGHT:
            raise UserError(f"{key}: the recipe defines its own {part}; change it there")


def refuse_unfit_recipe(program: TrainingProgram, tries_body: bool = False) -> tuple[str, ...]:
    """Raises `UserError` for a recipe that is known to fail in training, which the body of a
    script's step may show. Returns notes for the user."""
    workload, settings = program.workload, program.settings
    if settings.eval_every and not workload.num_held_out:
        raise UserError(
            f"eval_every={settings.eval_every}: the recipe has no held_out data; add some, or use "
            "--set eval_every=0"
        )
    for name in workload.metrics:
        if name == "loss" or not name.isidentifier():
            raise UserError(
                f"metrics: '{name}' is reported as eval_{name}: use letters, digits and _ for its "
                "name, and not 'loss', the name of the held-out loss"
            )
    module = build_on_meta(workload, settings)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(
            f"the model {type(module).__name__} has no trainable parameters: add layers with "
            "parameters, and leave requires_grad on for them"
        )
    refuse_other_state(module)
    workload.blocks(module)
    refuse_unfit(optimizer_factory_of(workload, settings), trained_dims(module))
    if tries_body and program.loop is not None and isinstance(workload, CustomWorkload):
        note = try_body(program.loop, workload)
        return (note,) if note else ()
    return ()


def notes_on(program: TrainingProgram) -> tuple[str, ...]:
    """Notes about the recipe for the user who starts the run."""
    settings, num_held_out = program.settings, program.workload.num_held_out
    num_evaluated = settings.num_evaluated(num_held_out)
    notes = []
    if settings.eval_every and num_held_out > num_evaluated:
        notes.append(
            f"evaluations use the first {num_evaluated} of {num_held_out} held-out samples, by "
            "eval_samples"
        )
    source = program.loop.declaration.source if program.loop is not None else None
    if source is not None and (note := source.note_on_epochs(settings.batch)):
        notes.append(note)
    return tuple(notes)


def identity(recipe: Recipe | Script, program: TrainingProgram) -> dict[str, Any]:
    """The recipe's entries in `recipe.json`: the settings that have an effect, a digest of the
    names, shapes and dtypes of the state, and a digest of the file of its loss or loop."""
    settings = program.settings.model_dump(mode="json")
    specs = [(spec.name, spec.shape, spec.dtype) for spec in program.specs()]
    return {
        "settings": {key: value for key, value in settings.items() if key not in UNSAID},
        STATE_DIGEST: sha256(repr(specs).encode()).hexdigest(),
        SOURCE: _source_of(recipe),
    }


def changed_source(stored: dict[str, Any], now: dict[str, Any]) -> str | None:
    """A warning if the recipe's file has changed since the run began."""
    before, after = stored.get(SOURCE), now.get(SOURCE)
    if not before or not after or before["sha256"] == after["sha256"]:
        return None
    return (
        f"{after['file']} has changed since the run began: the state still fits; check that the "
        "computation is the same"
    )


def _source_of(recipe: Recipe | Script) -> dict[str, str] | None:
    function = recipe.function if isinstance(recipe, Script) else recipe.loss
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
        content = Path(file).read_bytes() if file else None
    except (TypeError, OSError):  # a function typed into a notebook has no file
        return None
    return {"file": file, "sha256": sha256(content).hexdigest()} if file and content else None
