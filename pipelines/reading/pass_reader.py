"""Reading of a pass: the samples of its microbatches, each under its seed, in one batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch

from pipelines.reading.tensor_rows import RowReader, row_reader
from pipelines.settings.recipe import Dataset

Part = tuple[int, tuple[int, ...]]
"""The seed and the samples of a microbatch."""
Request = tuple[Part, ...]
"""What a pass reads."""
IDLE = -1
"""Instead of a sample: none is being read."""


@dataclass
class PassReader:
    """A dataset with its `collate`; it can be pickled by value and used in any process."""

    open_dataset: Callable[[], Dataset]
    collate: Callable[[list[Any]], Any]
    begin_process: Callable[[int], None] | None = None
    """Called once in a reader process with its number, as torch's `worker_init_fn`."""

    @cached_property
    def dataset(self) -> Dataset:
        return self.open_dataset()

    @cached_property
    def _rows(self) -> RowReader | None:
        return row_reader(self.dataset, self.collate)

    def read(self, request: Request, note: Callable[[int], None] = lambda sample: None) -> Any:
        """The batch of a pass. `note` is called with each sample before it is read, and with `IDLE`
        before `collate`."""
        if self._rows is not None:
            samples = [sample for _, part in request for sample in part]
            note(samples[0])
            if (batch := self._rows(samples)) is not None:
                return batch  # draws nothing that a seed would decide
        items = self.items(request, note)
        note(IDLE)
        return self.collate(items)

    def items(
        self, request: Request, note: Callable[[int], None] = lambda sample: None
    ) -> list[Any]:
        """What the dataset returns for each sample. Random augmentation of a microbatch follows
        its seed."""
        items = []
        follow = getattr(self.dataset, "follow", None)  # a stream makes others on its way
        for seed, samples in request:
            seed_host(seed)
            for sample in samples:
                note(sample)
                if follow is not None:
                    follow(partial(note, sample))
                items.append(self.dataset[sample])
        return items


def num_samples_of(request: Request) -> int:
    return sum(len(samples) for _, samples in request)


def seed_host(seed: int) -> None:
    """Seed the random generators of torch, Python and NumPy on the host."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class ReadPart(Protocol):
    """What is read of a microbatch."""

    @property
    def reading_seed(self) -> int: ...

    @property
    def samples(self) -> Sequence[int]: ...


def request_of(parts: Sequence[ReadPart]) -> Request:
    return tuple((part.reading_seed, tuple(part.samples)) for part in parts)
