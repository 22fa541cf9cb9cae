"""What ready-made callbacks share: packages that are no dependencies, and the scalars of a step."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from pipelines.callbacks.records import CommittedStep
from pipelines.errors import UserError

NOT_TRAINING = ("step", "time", "generation", "skipped", "missing")
OF_THE_RUN = ("world_size", "tokens")


def import_package(module: str, package: str, name: str) -> ModuleType:
    """A module of a package that is no dependency. Raises `UserError` if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"{name} needs the package {package} ({error}): pip install {package}"
        ) from None


def scalars_of(step: CommittedStep) -> dict[str, float]:
    """The numbers of a step by name: `train/loss`, `reported/accuracy`, `time/step_s`."""
    scalars: dict[str, float] = {}
    for name, value in step.metrics.items():
        if name in NOT_TRAINING or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name in step.reported:
            group = "reported"
        elif name in OF_THE_RUN:
            group = "run"
        else:
            group = "time" if name.endswith("_s") else "train"
        scalars[f"{group}/{name}"] = value
    return scalars
