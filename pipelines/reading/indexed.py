"""Training data of any kind, opened so that any worker can read any sample by its index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipelines.errors import UserError
from pipelines.reading.endless import Endless
from pipelines.reading.foreign_datasets import refuse_foreign
from pipelines.reading.stream import Stream, is_stream
from pipelines.reading.stream_positions import NUM_STEPS, StreamPositions
from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Dataset


def open_indexed(
    open_dataset: Callable[[], Any], settings: TrainSettings, positions: str | None = None
) -> Dataset:
    """Open training data that any worker can read by index.

    `positions` is the folder or URL for the positions of a stream. Raises `UserError` for data that
    can be iterated only once.
    """
    dataset = open_dataset()
    refuse_foreign(dataset)
    if isinstance(dataset, Endless):
        dataset.seed = settings.seed
    if not is_stream(dataset):
        return map_style(dataset)
    reading = settings.reading
    num_ahead = reading.prefetch_factor if reading.num_readers else 0  # passes, at most a step each
    num_recent = (2 + num_ahead) * settings.batch
    noted = StreamPositions(positions, NUM_STEPS * settings.batch) if positions else None
    return Stream(dataset, settings.microbatch, num_recent, settings.seed, noted)


def map_style(dataset: Any, name: str = "data") -> Dataset:
    """A dataset with a length and an index. Raises `UserError` for another."""
    refuse_foreign(dataset)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(type(dataset), name)]
    if missing:
        stream = ", or one that can be iterated again and again" if name == "data" else ""
        raise UserError(
            f"the recipe's {name} returned {type(dataset).__name__}, which has no "
            f"{' and no '.join(missing)}: return a dataset with both, so that any worker can read "
            f"any sample{stream}"
        )
    samples: Dataset = dataset
    return samples
