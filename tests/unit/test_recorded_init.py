"""Large custom modules are drawn by region from the distributions of their constructor."""

from __future__ import annotations

import copy
import resource
from collections.abc import Callable
from math import sqrt

import pytest
import torch
from torch import Tensor, nn

from elastic.geometry.regions import Region
from pipelines.training.custom.modules.custom_module import (
    InitialValues,
    build_on_host,
    build_shapes,
)
from pipelines.training.workload.initial_values import (
    Constant,
    Distribution,
    Normal,
    TruncatedNormal,
    Uniform,
    slices_of,
)
from pipelines.training.workload.recorded_init import Recorder

SHAPE = (512, 256)
init = nn.init


def fill_tensor(fill: Callable[[Tensor], object]) -> Tensor:
    tensor = torch.empty(SHAPE)
    with torch.no_grad():
        fill(tensor)
    return tensor


@pytest.mark.parametrize(
    ("make_tensor", "expected"),
    [
        (lambda: torch.randn(SHAPE), Normal(0.0, 1.0)),
        (lambda: torch.randn(SHAPE) * 0.5 + 1, Normal(1.0, 0.5)),
        (lambda: torch.rand(SHAPE), Uniform(0.0, 1.0)),
        (lambda: torch.zeros(SHAPE), Constant(0.0)),
        (lambda: torch.ones(SHAPE), Constant(1.0)),
        (lambda: fill_tensor(lambda t: init.normal_(t, 1.0, 2.0)), Normal(1.0, 2.0)),
        (lambda: fill_tensor(lambda t: init.constant_(t, 3.0)), Constant(3.0)),
        (lambda: fill_tensor(lambda t: t.normal_().div_(4).sub_(1)), Normal(-1.0, 0.25)),
        (lambda: fill_tensor(init.xavier_uniform_), Uniform(-sqrt(6 / 768), sqrt(6 / 768))),
        (lambda: fill_tensor(init.kaiming_normal_), Normal(0.0, sqrt(2 / 256))),
        (
            lambda: fill_tensor(lambda t: init.trunc_normal_(t, 0.0, 0.02, -0.04, 0.04)),
            TruncatedNormal.between(0.0, 0.02, -0.04, 0.04),
        ),
        (
            lambda: fill_tensor(
                lambda t: t.uniform_(-0.9, 0.9).erfinv_().mul_(2).add_(1).clamp_(-1, 2)
            ),
            TruncatedNormal(-0.9, 0.9, 2.0, 1.0, -1, 2),
        ),
    ],
)
def test_recorded_distribution_is_that_of_the_constructor(
    make_tensor: Callable[[], Tensor], expected: Distribution
) -> None:
    with Recorder() as recorder:
        tensor = make_tensor()
    record = recorder.record(tensor)
    assert record is not None and record.distribution is not None
    assert type(record.distribution) is type(expected)
    assert vars(record.distribution) == pytest.approx(vars(expected))


@pytest.mark.parametrize(
    "change",
    [
        init.orthogonal_,
        lambda t: t.normal_()[3].zero_(),
        lambda t: t.normal_().abs_(),
        lambda t: t.copy_(torch.arange(t.numel()).view(SHAPE)),
        lambda t: t.normal_().mul_(torch.arange(SHAPE[1])),
    ],
)
def test_operation_that_cannot_be_recorded_is_executed(
    change: Callable[[Tensor], object],
) -> None:
    with Recorder() as recorder:
        tensor = fill_tensor(change)
    assert recorder.record(tensor) is None
    assert tensor.isfinite().all() and 0 < tensor.float().std() < 1e6


def test_truncated_normal_values_are_those_of_torch() -> None:
    values = InitialValues(Large, 1, most_bytes=0)
    with pytest.warns(UserWarning):
        drawn_values = values.draw(
            "embed.weight", (1024, 256), Region.whole((1024, 256)), never_interrupt
        )
    expected = init.trunc_normal_(torch.empty(1024, 256), 0.0, 0.5, -0.5, 1.0)
    assert -0.5 <= drawn_values.min() < -0.499 and 0.999 < drawn_values.max() <= 1.0
    assert drawn_values.mean().item() == pytest.approx(expected.mean().item(), abs=0.01)
    assert drawn_values.std().item() == pytest.approx(expected.std().item(), rel=0.02)


def never_interrupt() -> None:
    """An interrupt that never raises."""


class Large(nn.Module):
    """A module with copies, a padding row, a table of positions and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, 256)
        init.trunc_normal_(self.embed.weight, 0.0, 0.5, -0.5, 1.0)
        self.words = nn.Embedding(2048, 256, padding_idx=3)
        self.first = nn.Linear(256, 512)
        self.twin = copy.deepcopy(self.first)
        self.tied = nn.Linear(256, 512)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(100_000)
        table = torch.zeros(1024, 256)
        table[:, 0::2] = torch.arange(1024.0)[:, None].sin()
        self.register_buffer("table", table)
        self.register_buffer("mask", torch.ones(512, 512).tril(), persistent=False)
        self.rate = torch.linspace(0, 0.1, 3)[1].item()


def test_large_module_is_drawn_by_region_and_keeps_its_buffers() -> None:
    values, real = InitialValues(Large, 1, most_bytes=0), build_on_host(Large, 1).state_dict()
    drawn_values = {}
    with pytest.warns(UserWarning, match=r"the largest for words\.weight"):
        for name, tensor in real.items():
            shape = tuple(tensor.shape)
            drawn_values[name] = values.draw(name, shape, Region.whole(shape), never_interrupt).to(
                tensor.dtype
            )
    for name in ("norm.weight", "norm.running_var", "norm.num_batches_tracked", "table"):
        assert torch.equal(drawn_values[name], real[name]), name
    assert torch.equal(drawn_values["first.weight"], drawn_values["twin.weight"]), (
        "copies have the same values"
    )
    assert torch.equal(drawn_values["first.weight"], drawn_values["tied.weight"])
    assert not drawn_values["words.weight"][3].any() and drawn_values["words.weight"][2].any()
    region = Region((100, 30), (300, 200))
    part = InitialValues(Large, 1, most_bytes=0)
    with pytest.warns(UserWarning):
        for name in ("embed.weight", "words.weight", "first.weight"):
            shape = tuple(real[name].shape)
            assert torch.equal(
                part.draw(name, shape, region, never_interrupt),
                drawn_values[name][slices_of(region)],
            )


def test_shapes_of_a_large_module_keep_tensors_outside_of_the_state() -> None:
    module = build_shapes(Large, 1, most_bytes=0)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert torch.equal(module.mask, torch.ones(512, 512).tril())
    assert module.rate == pytest.approx(0.05)


class Huge(nn.Module):
    """A module of 4.3 GB with a buffer that the meta device alone cannot build."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16384, 8192) for _ in range(8))
        self.register_buffer("scale", torch.ones(4), persistent=False)


def test_drawing_a_shard_of_a_large_module_takes_memory_of_the_shard_size() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = InitialValues(Huge, 0)
    assert values.is_large
    for layer in range(8):
        values.draw(
            f"layers.{layer}.weight", (8192, 16384), Region((0, 0), (64, 16384)), never_interrupt
        )
    taken_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert taken_bytes < 200e6, "the whole module has 4.3 GB"
