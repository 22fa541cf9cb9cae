"""Each rank of `tp` draws what one process draws for its part of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic.geometry.model_limits import Limits
from pipelines.errors import UserError
from pipelines.training.tensor.draw_trial import FirstOf, find_draws, for_trial
from pipelines.training.tensor.sharded_draws import (
    ShardedDraw,
    ShardedDraws,
    Unknown,
    drawing_again,
)
from pipelines.training.workload.workload import Layer, ModelShape, Style

SIZE, NUM_TP, DIM = 6, 3, 1
Draw = Callable[[Tensor], Tensor]
DRAWS: dict[str, Draw] = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "dropout, transposed": lambda x: functional.dropout(x.transpose(2, 3), 0.3),
    "dropout, in place": lambda x: functional.dropout(x * 1, 0.3, True, True),
    "dropout of channels": lambda x: functional.dropout2d(x, 0.3),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, train=True),
    "attention": lambda x: functional.scaled_dot_product_attention(
        x, x, x, dropout_p=0.3, is_causal=True
    ),
    "attention, mask": lambda x: functional.scaled_dot_product_attention(
        x, x + 1, x, torch.ones(4, 4).tril(-1).bool(), 0.3, scale=0.5
    ),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(0.5, 2),
    "rand": lambda x: x + torch.rand(2, x.shape[1], 4, 1),
    "randn, size": lambda x: x + torch.randn(size=(2, x.shape[1], 4, 1)),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn_like": lambda x: x * torch.randn_like(x, dtype=torch.float64),
}


class LastOf(FirstOf):
    """The last rank."""

    def rank(self) -> int:
        return self.size() - 1


@pytest.mark.parametrize("ranks", [FirstOf(NUM_TP), LastOf(NUM_TP)])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_for_a_part_are_those_for_the_whole_tensor(name: str, ranks: FirstOf) -> None:
    whole = torch.randn(2, SIZE, 4, 8, dtype=torch.float64)
    own = whole.chunk(NUM_TP, DIM)[ranks.rank()]

    def run(x: Tensor) -> list[Tensor]:
        torch.manual_seed(4)
        return [functional.dropout(torch.ones(5)), DRAWS[name](x), torch.rand(3)]

    expected = run(whole)
    expected[1] = expected[1].chunk(NUM_TP, DIM)[ranks.rank()]
    with ShardedDraws([None, ShardedDraw(DIM, SIZE), None], ranks) as mode:
        actual = run(own)
    mode.refuse_fewer()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


class Wide(nn.Module):
    """Two layers that `tp` shards, with draws before, between and behind them."""

    def __init__(self, between: Draw = functional.dropout) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(4, SIZE), nn.Linear(SIZE, 4), between

    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.between(self.up(functional.dropout(hidden)))
        return functional.dropout(self.down(wide))


class Normed(nn.Module):
    """Two layers that `tp` shards, with a norm of each head between them or of all behind them."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.up, self.down, self.place = nn.Linear(4, SIZE), nn.Linear(SIZE, 4), place
        self.norm = nn.LayerNorm(2 if place == "between" else 4)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.up(hidden)
        if self.place == "between":
            wide = self.norm(wide.unflatten(-1, (-1, 2))).flatten(-2)
        narrow = self.down(wide)
        return self.norm(narrow) if self.place == "behind" else narrow


WIDE = ModelShape((Layer((), 1),), Limits(), {"up": "colwise", "down": "rowwise"})


def draws_of(between: Draw) -> object:
    whole, cut = (for_trial(Wide(between), torch.float64) for _ in range(2))
    hidden = torch.empty(2, 5, 4, dtype=torch.float64, device="meta")
    return find_draws(whole, cut, WIDE, NUM_TP, lambda module: module(hidden))


def test_trial_finds_the_draws_for_sharded_activations() -> None:
    draws = draws_of(lambda wide: functional.dropout(wide.mT).mT)
    assert draws == [None, ShardedDraw(1, SIZE), None]


@pytest.mark.parametrize(
    ("styles", "place", "message"),
    [
        ({}, "between", "would see only this rank's part.*'norm': SequenceParallel"),
        ({"norm": "partial"}, "between", None),
        ({}, "behind", None),
        ({"norm": "partial"}, "behind", "norm sees whole tensors on each rank: leave it out"),
    ],
)
def test_replicated_layer_needs_whole_tensors_or_summed_gradients(
    styles: dict[str, Style], place: str, message: str | None
) -> None:
    """Without the sum each rank would train it by its own heads alone, and the ranks differ."""
    shape = replace(WIDE, styles={**WIDE.styles, **styles})
    whole, cut = (for_trial(Normed(place), torch.float64) for _ in range(2))
    hidden = torch.empty(2, 5, 4, dtype=torch.float64, device="meta")

    def find() -> object:
        return find_draws(whole, cut, shape, NUM_TP, lambda module: module(hidden))

    if message is None:
        assert find() == []
        return
    with pytest.raises(UserError, match=message):
        find()


@pytest.mark.parametrize(
    ("between", "kind", "message"),
    [
        (lambda wide: wide.view(2, 5, SIZE), UserError, r"tp=3: the module fails.*write -1"),
        (
            lambda wide: functional.dropout(wide) if wide.shape[-1] == SIZE else wide,
            UserError,
            "draws other random numbers",
        ),
        (lambda wide: functional.dropout(wide.flatten()).view(wide.shape), UserError, "no part of"),
        (lambda wide: wide * wide.sum().item(), Unknown, "does not run on the meta device"),
    ],
)
def test_trial_refuses_in_one_line_what_ranks_cannot_compute(between, kind, message: str) -> None:
    with pytest.raises(kind, match=message) as refused:
        draws_of(between)
    assert "\n" not in str(refused.value)


def test_recomputation_draws_the_same_again() -> None:
    hidden, mode = torch.ones(2, 2), ShardedDraws([None, ShardedDraw(1, SIZE)], FirstOf(NUM_TP))
    with mode:
        functional.dropout(torch.ones(5))
        forward = drawing_again(functional.dropout)
        state = torch.get_rng_state()
        first = forward(hidden)
    torch.set_rng_state(state)
    assert torch.equal(forward(hidden), first)
    torch.set_rng_state(state)
    assert torch.equal(functional.dropout(torch.ones(2, SIZE))[:, :2], first)


def test_a_pass_that_draws_otherwise_is_refused() -> None:
    first = ShardedDraws([ShardedDraw(1, SIZE)], FirstOf(NUM_TP))
    with pytest.raises(UserError, match="other random numbers than the first"), first:
        functional.dropout(torch.ones(2, 3))
    with ShardedDraws([None], FirstOf(NUM_TP)) as mode:
        pass
    with pytest.raises(UserError, match="other random numbers than the first"):
        mode.refuse_fewer()


def test_draws_that_need_the_whole_tensor_are_refused() -> None:
    mode = ShardedDraws([ShardedDraw(1, SIZE)], FirstOf(NUM_TP))
    with pytest.raises(UserError, match="bernoulli cannot draw for the part"), mode:
        torch.bernoulli(torch.full((2, 2), 0.5))
