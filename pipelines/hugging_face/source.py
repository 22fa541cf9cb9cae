"""What is exported: the settings of a run, and one of its checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from actors.checkpoints import MANIFEST, folder_of, newest_whole
from pipelines.errors import UserError
from pipelines.hugging_face.shards import Read
from pipelines.run_folder import RunFolder, find_run
from pipelines.settings import TrainSettings
from pipelines.training.checkpoint import read_regions


@dataclass(frozen=True)
class Source:
    """A run's settings, where its prepared data lie (None: random), and a step of it to read."""

    settings: TrainSettings
    data_folder: Path | None
    step: int
    read: Read


def open_source(run_name: str, storage: Path, step: int | None = None) -> Source:
    """A run's checkpoint of a step, or the newest. Raises `UserError` if there is none."""
    run = find_run(run_name, storage)
    recipe = json.loads(run.recipe.read_text())
    data_folder = recipe["data_folder"]
    found_step, read = _open_checkpoint(run, step)
    return Source(
        TrainSettings.model_validate(recipe["settings"]),
        Path(data_folder) if data_folder else None,
        found_step,
        read,
    )


def _open_checkpoint(run: RunFolder, step: int | None) -> tuple[int, Read]:
    """Its step, and what reads regions from it."""
    if step is None:
        saved, _ = newest_whole(run.path)
        folder = Path(saved.path) if saved else None
        step = saved.step if saved else 0
    else:
        folder = _folders(run).get(step)
    if folder is None:
        steps = ", ".join(str(one) for one in _folders(run)) or "none"
        wanted = f"of step {step}" if step else "that is whole"
        raise UserError(
            f"run '{run.name}' in {run.storage} has no checkpoint {wanted}; there are: {steps}"
        )
    return step, lambda wanted: read_regions(folder, wanted)


def _folders(run: RunFolder) -> dict[int, Path]:
    """Each step's checkpoint; of a step that was redone the last."""
    manifests = [
        json.loads(path.read_text()) for path in run.checkpoints.glob(f"step-*/{MANIFEST}")
    ]
    places = sorted((one["step"], one["generation"]) for one in manifests)
    return {step: folder_of(run.path, step, generation) for step, generation in places}
