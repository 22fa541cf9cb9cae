"""What is exported: the settings of a run, and one of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.checkpoints import find_checkpoints
from actors.errors import DamagedCheckpoint
from actors.storage import open_storage
from pipelines.errors import UserError
from pipelines.hugging_face.shards import Read
from pipelines.run_folder import RunFolder, find_run
from pipelines.settings import TrainSettings
from pipelines.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class Source:
    """A run's settings, where its prepared data lie (path or URL; None: random), and a step."""

    settings: TrainSettings
    data_folder: str | None
    step: int
    read: Read


def open_source(run_name: str, storage: str | Path, step: int | None = None) -> Source:
    """A run's checkpoint of a step, or the newest. Raises `UserError` if there is none."""
    run = find_run(run_name, storage)
    recipe = run.recipe()
    assert recipe is not None
    found_step, read = _open_checkpoint(run, step)
    return Source(
        TrainSettings.model_validate(recipe["settings"]),
        recipe["data_folder"],
        found_step,
        read,
    )


def _open_checkpoint(run: RunFolder, step: int | None) -> tuple[int, Read]:
    """Its step, and what reads regions from it; of a step that was redone the last."""
    there = {saved.step: saved for saved in find_checkpoints(run.files).whole}
    wanted = max(there, default=None) if step is None else step
    if wanted is None or wanted not in there:
        told = "that is whole" if step is None else f"of step {step}"
        steps = ", ".join(map(str, there)) or "none"
        raise UserError(
            f"run '{run.name}' in {run.storage} has no checkpoint {told}; there are: {steps}"
        )
    others = ", ".join(str(one) for one in there if one != wanted) or "none"

    @contextmanager
    def telling_of_others() -> Iterator[None]:
        try:
            yield
        except DamagedCheckpoint as error:
            raise UserError(f"{error}; export another --step (there are: {others})") from None

    with telling_of_others():
        checkpoint = Checkpoint(open_storage(there[wanted].path))
    return wanted, telling_of_others()(checkpoint.read)
