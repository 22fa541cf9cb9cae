"""The program of a recipe as `elastic plan` builds it: without prepared data."""

from __future__ import annotations

from typing import Any

from pipelines.data.opening import RANDOM
from pipelines.run.plan import TrainRequest, settings_of
from pipelines.run.program import TrainingProgram
from pipelines.settings.user_code import user_code_errors


def planned_program(
    recipe: str, changes: tuple[str, ...] = (), device: str = "cpu"
) -> TrainingProgram:
    """Build the program; a model of tokens reads random ones. Raises `UserError` for a recipe that
    cannot train."""
    settings, custom = settings_of(TrainRequest(recipe, changes=changes))
    if custom is None:
        data = settings.data.model_copy(update={"source": RANDOM})
        settings = settings.model_copy(update={"data": data})
    kwargs: dict[str, Any] = {"settings": settings.model_dump(mode="json"), "device": device}
    if custom is None:
        return TrainingProgram(**kwargs)
    with user_code_errors(f"recipe {recipe}"):
        return TrainingProgram(**kwargs, recipe=custom)
