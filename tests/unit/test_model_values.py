"""What a script changes in its models between two steps is found, and kept as it was then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.state.model_values import ModelValues


def noted(*models: nn.Module) -> ModelValues:
    values = ModelValues()
    for model in models:
        values.add(model)
    values.note()
    return values


def flip(model: nn.Module) -> None:
    """The norm stays the same."""
    model[0].weight.data.neg_()


def change_one_of_many(model: nn.Module) -> None:
    model[0].weight.data[0, 0] += 1e-6


def change_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight *= 0.9


@pytest.mark.parametrize("change", [flip, change_one_of_many, change_in_place])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_change_is_found(change: Callable[[nn.Module], None], dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    nn.init.zeros_(model[0].weight[0, :1].detach())
    values = noted(model.to(dtype))
    assert values.changed() == []
    change(model)
    values.is_suspect = True  # as where the script has had `.data`
    assert values.changed() == ["0.weight"]


def test_values_are_kept_as_they_were_behind_the_committed_step() -> None:
    first, second = nn.Linear(2, 2), nn.BatchNorm1d(2)
    values = noted(first, second)
    second.running_mean.fill_(3.0)
    values.keep()
    assert values.kept.keys() == {"1.running_mean"} and values.changed() == []
    second.running_mean.fill_(9.0)  # behind a step that fails
    values.note_unread()
    assert values.kept["1.running_mean"].tolist() == [3.0, 3.0]
    second.running_mean = torch.full((2,), 4.0)
    values.keep()
    assert values.kept["1.running_mean"].tolist() == [4.0, 4.0]


def test_buffers_that_a_call_makes_and_replaced_parameters() -> None:
    model = nn.BatchNorm1d(2)
    model.register_buffer("cache", None)
    values = noted(model)
    model.cache = torch.ones(3)
    assert values.changed() == []
    model.running_mean = torch.ones(3)
    with pytest.raises(LoopMisused, match=r"model.running_mean: \(3,\) of torch.float32 in place"):
        values.changed()
    model.running_mean = torch.zeros(2)
    model.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(LoopMisused, match=r"model.weight: another parameter in place"):
        values.changed()
