"""The trial of merged passes finds recipes for which merging is another computation."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.custom.custom_workload import CustomWorkload
from pipelines.training.custom.merge_trial import why_unmergeable


def losses_of_samples(module: nn.Module, batch: Any) -> Tensor:
    return mse_loss(module(batch), batch, reduction="none").sum(1)


def sum_and_count(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return losses_of_samples(module, batch).sum(), len(batch)


def contrastive(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    features = normalize(module(batch))
    matches = torch.arange(len(batch))
    return cross_entropy(features @ batch.T, matches, reduction="sum"), len(batch)


def scaled_by_mean(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    """A loss whose value does not depend on the microbatch, but whose gradient does."""
    outputs = module(batch)
    scaled = (outputs - outputs.detach()) * outputs.mean(0).detach()
    return (scaled + 1.0).sum(), len(batch)


def counted_once(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return losses_of_samples(module, batch).sum(), 1


class Noisy(nn.Module):
    """Draws in forward, by a generator that autograd's own random functions do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(batch) * random.random()


def noisy_collate(items: list[Tensor]) -> Tensor:
    batch = torch.stack(items)
    return batch + torch.randn_like(batch)


class Augmented:
    """A dataset that draws for each sample; each microbatch has its own seed."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), float(index)) + torch.rand(3)


def make_workload(**changes: Any) -> CustomWorkload:
    recipe: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 3),
        "loss": losses_of_samples,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "data": Augmented,
        "settings": TrainSettings(batch=12, microbatch=2, dtype="float64"),
    }
    return CustomWorkload(Recipe(**recipe | changes))


def with_layer(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(3, 3), layer())


@pytest.mark.parametrize("loss", [losses_of_samples, sum_and_count])
@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_losses_of_samples_may_be_merged(loss: Callable[..., Any], microbatch: int) -> None:
    settings = TrainSettings(batch=12, microbatch=microbatch, dtype="float64")
    workload = make_workload(loss=loss, settings=settings, model=with_layer(nn.Tanh))
    assert workload.why_unmergeable is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": with_layer(lambda: nn.Dropout(0.5))}, "draws random numbers, as dropout does"),
        ({"model": Noisy}, "a pass of the module or loss draws random numbers"),
        ({"collate": noisy_collate}, "collate draws random numbers"),
        ({"model": with_layer(lambda: nn.BatchNorm1d(3))}, "updates buffer 1.running_mean"),
        (
            {"model": with_layer(lambda: nn.BatchNorm1d(3, track_running_stats=False))},
            "the loss of a sample depends on others of its microbatch",
        ),
        ({"loss": contrastive}, "the loss of a sample depends on others of its microbatch"),
        (
            {"loss": scaled_by_mean},
            "the gradient of weight depends on which samples share a microbatch",
        ),
        ({"loss": counted_once}, "the number of losses of a sample depends on its microbatch"),
        ({"loss": lambda m, b: losses_of_samples(m, b).mean()}, "the loss returns a mean"),
        ({"loss": lambda m, b: 1 / 0}, "the trial of merged microbatches failed: ZeroDivision"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_computations_are_not_merged(changes: dict[str, Any], reason: str) -> None:
    found = make_workload(**changes).why_unmergeable
    assert found is not None and reason in found


def test_large_module_is_not_tried_out() -> None:
    assert why_unmergeable(make_workload(), max_parameters=11) == (
        "the module has 12 parameters, and a trial of merged microbatches is run up to 11"
    )


def test_trial_leaves_the_generators_as_they_were() -> None:
    before = random.getstate(), torch.get_rng_state()
    assert make_workload(model=Noisy).why_unmergeable
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
