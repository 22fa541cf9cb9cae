"""The trial of merged passes finds recipes for which merging is another computation."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.checkpoint import checkpoint

from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.custom.custom_workload import CustomWorkload
from pipelines.training.custom.merge_trial import try_merging


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


COMPILED = TrainSettings(batch=12, microbatch=2, dtype="float64", compile=True)


class Noisy(nn.Module):
    """Draws in forward, by a generator that autograd's own random functions do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(batch) * random.random()


class RowDropout(nn.Module):
    """Dropout of whole features, whose mask is of dim 1 of the samples."""

    def forward(self, batch: Tensor) -> Tensor:
        return nn.functional.dropout(batch.T.repeat(2, 1), 0.5)[: batch.shape[1]].T


class OddDropout(nn.Module):
    """Draws a number of elements that two microbatches do not divide."""

    def forward(self, batch: Tensor) -> Tensor:
        return batch * nn.functional.dropout(torch.ones(3), 0.5)


class Attention(nn.Module):
    """Attention with dropout inside another function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, dropout=0.5, batch_first=True)

    def forward(self, batch: Tensor) -> Tensor:
        tokens = batch[:, None].repeat(1, 4, 1)
        return self.attention(tokens, tokens, tokens)[0].mean(1)


class Checkpointed(nn.Module):
    """Dropout that autograd runs once more in backward."""

    def forward(self, batch: Tensor) -> Tensor:
        return checkpoint(nn.functional.dropout, batch, 0.5, use_reentrant=True)


class WithAttention(nn.Module):
    """Fused attention with dropout, under a mask without a dim of samples."""

    def forward(self, batch: Tensor) -> Tensor:
        tokens = batch[:, None].repeat(1, 4, 1)
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        attend = nn.functional.scaled_dot_product_attention
        return attend(tokens, tokens, tokens, attn_mask=mask, dropout_p=0.5).sum(1)


class Noise(nn.Module):
    """Noise by several functions: stochastic depth, and values like a tensor's or of a size."""

    def forward(self, batch: Tensor) -> Tensor:
        kept = batch.new_empty(len(batch), 1).bernoulli_(0.5)
        noise = torch.rand_like(batch) + torch.randn(len(batch), 1, dtype=batch.dtype)
        return batch * kept + noise * torch.rand((len(batch), 3), dtype=batch.dtype)


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


@pytest.mark.parametrize("microbatch", [1, 2, 3])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout,
        lambda: nn.Dropout(0.01),
        lambda: nn.Dropout(0.5, inplace=True),
        nn.AlphaDropout,
        WithAttention,
        Noise,
    ],
)
def test_draws_for_samples_may_be_merged(layer: Any, microbatch: int) -> None:
    settings = TrainSettings(batch=12, microbatch=microbatch, dtype="float64")
    workload = make_workload(model=with_layer(layer), settings=settings)
    assert workload.why_unmergeable is None
    assert workload.divides_draws


def test_module_that_draws_nothing_divides_no_draws() -> None:
    assert not make_workload().divides_draws


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": with_layer(RowDropout)}, "the loss of a sample depends on others"),
        ({"model": with_layer(OddDropout)}, "draws random numbers, as dropout does"),
        ({"model": with_layer(Attention)}, "draws random numbers, as dropout does"),
        ({"model": with_layer(Checkpointed)}, "draws random numbers, as dropout does"),
        ({"model": with_layer(nn.Dropout), "collate": torch.stack}, "draws random numbers"),
        ({"model": with_layer(nn.Dropout), "settings": COMPILED}, "draws random numbers"),
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
    assert try_merging(make_workload(), max_parameters=11).why_not == (
        "the module has 12 parameters, and a trial of merged microbatches is run up to 11"
    )


def test_trial_leaves_the_generators_as_they_were() -> None:
    before = random.getstate(), torch.get_rng_state()
    assert make_workload(model=Noisy).why_unmergeable
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
