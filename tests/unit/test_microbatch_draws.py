"""Each microbatch of a merged pass draws what a pass with it alone would draw."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipelines.training.custom.modules.microbatch_draws import MicrobatchDraws
from pipelines.training.workload.seeds import forward_seed

CPU = torch.device("cpu")
SEEDS = 5, 11, 3
Draw = Callable[[Tensor], Tensor]
DRAWS: dict[str, Draw] = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "dropout, input by name": lambda x: functional.dropout(input=x, p=0.3),
    "dropout in place": lambda x: functional.dropout(x * 1.0, 0.3, True, True),
    "dropout of another order": lambda x: functional.dropout(x.mT, 0.3).mT,
    "dropout of channels": lambda x: functional.dropout1d(x, 0.3),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, train=True),
    "attention": lambda x: functional.scaled_dot_product_attention(
        x, x, x, dropout_p=0.3, is_causal=True
    ),
    "attention, mask of samples": lambda x: functional.scaled_dot_product_attention(
        x, x, x, (x @ x.mT).detach(), 0.3
    ),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "bernoulli_": lambda x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.3),
    "normal_": lambda x: x + torch.empty(len(x), 4, 8).normal_(1.0, std=2.0),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(),
    "rand": lambda x: x + torch.rand(len(x), 1, 8),
    "randn": lambda x: x + torch.randn(size=(len(x), 1, 8)),
    "randn, no generator": lambda x: x + torch.randn(len(x), 1, 8, generator=None),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn_like, twice": lambda x: x * torch.randn_like(x) + torch.randn_like(x),
}


@pytest.mark.parametrize("name", DRAWS)
def test_merged_pass_equals_single_microbatches_bit_for_bit(name: str) -> None:
    draw = DRAWS[name]
    microbatches = [torch.randn(2, 4, 8, requires_grad=True) for _ in SEEDS]
    merged = torch.cat([part.detach() for part in microbatches]).requires_grad_()
    apart = []
    for seed, part in zip(SEEDS, microbatches, strict=True):
        torch.manual_seed(forward_seed(seed))
        apart.append(draw(functional.dropout(part, 0.5)))
        apart[-1].square().sum().backward()
    before = torch.get_rng_state()
    draws = MicrobatchDraws(SEEDS, CPU)
    with draws:
        together = draw(functional.dropout(merged, 0.5))
    together.square().sum().backward()
    assert draws.has_divided
    assert torch.equal(together, torch.cat(apart))
    assert merged.grad is not None
    assert torch.equal(merged.grad, torch.cat([part.grad for part in microbatches]))
    assert torch.equal(torch.get_rng_state(), before), "the default generator is untouched"


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: functional.dropout1d(x.view(1, 6, 1), 0.5),
        lambda x: torch.rand(4),
        lambda x: x * torch.rand(()),
        lambda x: torch.randperm(len(x)),
        lambda x: torch.empty(4).uniform_(),
    ],
)
def test_indivisible_draw_shows_in_the_default_generator(draw: Draw) -> None:
    before = torch.get_rng_state()
    with MicrobatchDraws(SEEDS, CPU):
        draw(torch.ones(6))
    assert not torch.equal(torch.get_rng_state(), before)


def test_draw_from_a_generator_of_its_own_is_left_alone() -> None:
    expected = torch.rand(6, generator=torch.Generator().manual_seed(1))
    with MicrobatchDraws(SEEDS, CPU):
        drawn = torch.rand(6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn, expected)


def test_attention_without_dropout_is_computed_in_one_call() -> None:
    values = torch.randn(6, 4, 8)
    draws = MicrobatchDraws(SEEDS, CPU)
    with draws:
        functional.scaled_dot_product_attention(values, values, values)
    assert not draws.has_divided


def test_dropout_of_nothing_is_computed_in_one_call() -> None:
    values = torch.randn(6, 4)
    draws = MicrobatchDraws(SEEDS, CPU)
    with draws:
        assert functional.dropout(values, 0.0) is values
        assert functional.dropout(values, 0.3, training=False) is values
    assert not draws.has_divided
