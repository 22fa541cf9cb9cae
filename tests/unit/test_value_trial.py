"""A plan of tensor parallelism is tried out with values: what it computes otherwise is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel
from torch.nn.functional import dropout, scaled_dot_product_attention

from pipelines.settings import TrainSettings
from pipelines.settings.recipe import Recipe
from pipelines.training.custom.custom_workload import CustomWorkload

WIDTH, HEADS, LENGTH = 8, 4, 5
SIZE = WIDTH // HEADS


class Separate(nn.Module):
    """Attention with a layer for each of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(SIZE)

    def parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        return [self.q(hidden), self.k(hidden), self.v(hidden)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, SIZE)) for part in self.parts(hidden))
        heads = [part.transpose(1, 2) for part in (self.norm(q), self.norm(k), v)]
        attended = scaled_dot_product_attention(*heads, dropout_p=0.1 if self.training else 0.0)
        return self.out(dropout(attended.transpose(1, 2).flatten(2), 0.2, self.training))


class Fused(Separate):
    """One layer whose output is cut into queries, keys and values by thirds of what a rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.q = self.k = self.v = nn.Identity()

    def parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        return list(self.qkv(hidden).chunk(3, -1))


class Interleaved(Fused):
    """The same with the three parts of a head side by side, so that a rank has whole heads."""

    def parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        heads = self.qkv(hidden).unflatten(-1, (-1, 3, SIZE))
        return [part.flatten(2) for part in heads.unbind(-2)]


class Causal(Separate):
    """A module of its own makes the mask, which has infinite values."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = Mask()

    def parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = super().parts(hidden)
        return [q, k + self.mask(hidden).exp().sum() * 0, v]


class Mask(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.shape[1]
        return hidden.new_full((length, length), float("-inf")).triu(1)


class Autocast(Separate):
    """It computes in bfloat16, whatever its parameters are."""

    def parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [part.to(hidden.dtype) for part in super().parts(hidden)]


class Tempered(Separate):
    """A parameter of its own meets a rank's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = super().parts(hidden)
        return [q, k, v * self.temperature]


class Averaged(Separate):
    """It takes a mean over the heads that a rank has."""

    def parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = super().parts(hidden)
        return [q - q.mean(-1, keepdim=True), k, v]


class Net(nn.Module):
    def __init__(self, attention: type[Separate]) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(WIDTH, WIDTH), attention()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        return self.head(hidden + self.attention(hidden))


def tp_refusal(attention: type[Separate], **settings: object) -> str | None:
    columns = ("qkv",) if issubclass(attention, Fused) else ("q", "k", "v")
    plan = {f"attention.{name}": "colwise" for name in columns}
    plan |= {"attention.out": "rowwise", "attention.norm": SequenceParallel(sequence_dim=2)}
    recipe = Recipe(
        lambda: Net(attention),
        lambda model, batch: model(batch).pow(2).mean(),
        lambda named: torch.optim.SGD(named, lr=0.1),
        lambda: [torch.randn(LENGTH, WIDTH) for _ in range(4)],
        TrainSettings(batch=4, microbatch=2, **settings),
        plan=plan,
        tp_divides=HEADS,
    )
    return dict(CustomWorkload(recipe).limits().refused).get("tp")


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (Separate, None),
        (Interleaved, None),
        (Causal, None),
        (Autocast, None),
        (Fused, "attention.out returns other values"),
        (Tempered, "attention.temperature gets another gradient"),
        (Averaged, "attention.out returns other values"),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_plan_that_computes_something_else_is_refused_in_one_line(
    attention: type[Separate], message: str | None, dtype: str
) -> None:
    reason = tp_refusal(attention, dtype=dtype)
    assert reason is None if message is None else message in (reason or "")
    assert "\n" not in (reason or "")


class Large(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3_000_000, WIDTH)


class Reading(Separate):
    """A module that fails with values on a host."""

    def parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        if not hidden.is_meta:
            raise NotImplementedError("no kernel for this device")
        return super().parts(hidden)


@pytest.mark.parametrize(
    ("attention", "reason"),
    [(Large, "the module has 24,000,"), (Reading, "no kernel for this device")],
)
def test_a_line_says_that_a_plan_was_not_tried_out_with_values(
    attention: type[Separate], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tp_refusal(attention) is None
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("elastic: tp was tried out with shapes, not with values: ")
    assert reason in line
