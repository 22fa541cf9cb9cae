"""Datasets of WebDataset and MosaicML Streaming are recognised and refused, never read silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from pipelines.errors import UserError
from pipelines.loop import Run
from pipelines.loop.script import script_of
from pipelines.loop.state.errors import LoopMisused
from pipelines.reading.indexed import map_style, open_indexed
from pipelines.settings import TrainSettings


class Numbers(IterableDataset[int]):
    """What the classes of both libraries are: an iterable dataset, one also with an index."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


WebDataset = type("WebDataset", (Numbers,), {"__module__": "webdataset.compat"})
WebLoader = type("WebLoader", (Numbers,), {"__module__": "webdataset"})
StreamingDataset = type("StreamingDataset", (Numbers,), {"__module__": "streaming.base.dataset"})


class OfTheUser(StreamingDataset):  # type: ignore[misc, valid-type]
    """Users derive from it."""


class Wrapping(IterableDataset[int]):
    """A dataset that iterates over another one."""

    def __init__(self) -> None:
        self.inner = WebDataset()

    def __iter__(self) -> Iterator[int]:
        yield from self.inner


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (WebDataset, r"WebDataset of webdataset deals tar files .*use TarDataset\(urls"),
    (Wrapping, "WebDataset of webdataset"),
    (StreamingDataset, r"StreamingDataset of streaming deals shards .*use MdsDataset\(folder"),
    (OfTheUser, "OfTheUser of streaming"),
    (lambda: Subset(OfTheUser(), [1]), "OfTheUser of streaming"),
]


@pytest.mark.parametrize(("dataset", "reason"), REFUSED)
def test_recipe_with_it_is_refused_in_one_line(dataset: Callable[[], Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as raised:
        open_indexed(dataset, TrainSettings())
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=reason):
        map_style(dataset(), "held_out")


def script(item: Callable[[], Any]) -> Callable[[Run], None]:
    def train(run: Run) -> None:
        model = nn.Linear(1, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), item())

    return train


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        *((lambda made=made: DataLoader(made(), batch_size=2), reason) for made, reason in REFUSED),
        (WebDataset, "WebDataset of webdataset"),
        (WebLoader, "WebLoader of webdataset"),
    ],
)
def test_loop_with_it_is_refused_in_one_line(item: Callable[[], Any], reason: str) -> None:
    with pytest.raises(LoopMisused, match=rf"run\.prepare: .*{reason}") as raised:
        script_of(script(item))
    assert "\n" not in str(raised.value)


def test_dataset_of_another_module_of_that_name_is_read() -> None:
    other = type("StreamingDataset", (Numbers,), {"__module__": "streaming_of_mine"})
    assert open_indexed(other, TrainSettings())[3] == 3
