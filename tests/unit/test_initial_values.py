"""Initial values: the same under every layout, drawn by region, from the right distribution."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic.geometry.regions import Region
from pipelines.hugging_face.building import build, distribution, draw_tensor
from pipelines.training.workload.initial_values import Constant, Normal, Uniform, draw, slices_of

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
}


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    """A shape of several tiles, and a region in it."""
    limits = draw(st.sampled_from([(), (40_000,), (70, 1200), (3, 70, 600), (2, 3, 40, 520)]))
    shape = tuple(draw(st.integers(1, limit)) for limit in limits)
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(
        draw(st.integers(1, size - first)) for size, first in zip(shape, offsets, strict=True)
    )
    return shape, Region(offsets, lengths)


@given(boxes(), st.sampled_from([Normal(1.0, 2.0), Uniform(-3.0, 1.0), Constant(0.5)]))
def test_region_has_the_values_of_the_whole_tensor(box, source) -> None:
    shape, region = box
    whole = draw(source, "layers.0.weight", 7, shape, Region.whole(shape))
    assert torch.equal(draw(source, "layers.0.weight", 7, shape, region), whole[slices_of(region)])


@pytest.mark.parametrize(
    ("source", "mean", "std"),
    [(Normal(1.0, 2.0), 1.0, 2.0), (Uniform(-3.0, 1.0), -1.0, 4.0 / 12**0.5)],
)
def test_values_follow_the_distribution_and_tiles_differ(source, mean, std) -> None:
    shape = (4 * 32, 3 * 512)
    values = draw(source, "weight", 0, shape, Region.whole(shape))
    assert values.mean().item() == pytest.approx(mean, abs=5 * std / values.numel() ** 0.5)
    assert values.std().item() == pytest.approx(std, rel=0.01)
    tiles = {tile.numpy().tobytes() for row in values.split(32) for tile in row.split(512, dim=1)}
    assert len(tiles) == 12


def test_drawing_a_vector_costs_about_as_much_as_a_matrix_of_its_size() -> None:
    """The tiles of a vector have one row, so no other values are drawn."""
    vector_s = measure(
        lambda: draw(Normal(0.0, 1.0), "bias", 0, (1 << 22,), Region((0,), (1 << 22,)))
    )
    matrix = Region.whole((2048, 2048))
    assert vector_s < 5 * measure(lambda: draw(Normal(0.0, 1.0), "weight", 0, (2048, 2048), matrix))


def measure(action: Callable[[], object]) -> float:
    """The shortest of three runs, to exclude the effect of other processes."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


@pytest.mark.parametrize(("name", "seed"), [("other", 0), ("weight", 1)])
def test_values_depend_on_name_and_seed(name: str, seed: int) -> None:
    region = Region.whole((8, 8))
    first, second = (
        draw(Normal(0.0, 1.0), *key, (8, 8), region) for key in (("weight", 0), (name, seed))
    )
    assert not (first == second).any()


def test_distribution_of_each_llama_parameter_is_found_without_drawing_it() -> None:
    model = build(LLAMA)
    for name, parameter in model.named_parameters():
        actual = distribution(model, name)
        assert actual == (Constant(1.0) if parameter.ndim == 1 else Normal(0.0, 0.05)), name
        drawn = draw_tensor(model, name, seed=1)
        assert drawn.std().item() == pytest.approx(0.05 if drawn.ndim > 1 else 0.0, rel=0.05)


def test_partly_overwritten_parameter_has_no_known_distribution() -> None:
    """The padding row of an embedding is set to 0 after the draw."""
    model = build({**LLAMA, "pad_token_id": 3})
    name = "model.embed_tokens.weight"
    drawn = draw_tensor(model, name, seed=1)
    if drawn[3].any():
        pytest.skip("this transformers does not set the row to 0")
    assert distribution(model, name) is None


def test_modules_of_a_model_stay_on_the_meta_device() -> None:
    model = build(LLAMA)
    assert all(distribution(model, name) for name, _ in model.named_parameters())
    assert all(isinstance(p, nn.Parameter) and p.is_meta for p in model.parameters())
