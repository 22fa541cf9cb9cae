"""A plan of tensor parallelism is tried out with values: what it computes otherwise is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from pipelines.loop import Run
from pipelines.loop.script import script_of
from pipelines.run.custom_plan import refuse_unfit_recipe
from pipelines.run.program import TrainingProgram
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


def plan_of(attention: type[Separate]) -> dict[str, object]:
    columns = ("qkv",) if issubclass(attention, Fused) else ("q", "k", "v")
    plan: dict[str, object] = {f"attention.{name}": "colwise" for name in columns}
    return plan | {"attention.out": "rowwise", "attention.norm": SequenceParallel(sequence_dim=2)}


def tp_refusal(attention: type[Separate], **settings: object) -> str | None:
    recipe = Recipe(
        lambda: Net(attention),
        lambda model, batch: model(batch).pow(2).mean(),
        lambda named: torch.optim.SGD(named, lr=0.1),
        lambda: [torch.randn(LENGTH, WIDTH) for _ in range(4)],
        TrainSettings(batch=4, microbatch=2, **settings),
        plan=plan_of(attention),
        tp_divides=HEADS,
    )
    return dict(CustomWorkload(recipe).limits().refused).get("tp")


def script_refusal(attention: type[Separate], is_tried: bool = True, **attributes: Any) -> Any:
    """The same of a script whose body calls the model and one of its parts."""

    def train(run: Run) -> None:
        net = Net(attention).double()
        for name, value in attributes.items():
            setattr(net, name, nn.Parameter(value))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        points = TensorDataset(torch.randn(8, LENGTH, WIDTH, dtype=torch.float64))
        loader = DataLoader(points, batch_size=2)
        run.prepare(net, optimizer, loader, plan=plan_of(attention), tp_divides=HEADS)
        for step in run.steps(2, microbatches=2):
            with step:
                for (inputs,) in step.batches():
                    out = net(inputs) + net.head(net.attention(net.embed(inputs)))
                    step.backward(out.pow(2).mean() * (1 + net.scale if attributes else 1))

    script = script_of(train)
    settings = script.settings.model_dump(mode="json")
    program = TrainingProgram(settings, device="cpu", recipe=script)
    refuse_unfit_recipe(program, tries_body=is_tried)
    return dict(program.workload.limits().refused).get("tp")


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


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (Separate, None),
        (Interleaved, None),
        (Autocast, None),
        (Fused, "attention.out returns other values"),
        (Tempered, "attention.temperature gets another gradient"),
    ],
)
def test_plan_of_a_script_is_tried_out_with_values_of_its_calls(
    attention: type[Separate], message: str | None
) -> None:
    reason = script_refusal(attention)
    assert reason is None if message is None else message in (reason or "")
    assert "\n" not in (reason or "")


def test_parameter_that_a_body_uses_itself_is_refused_under_tp() -> None:
    reason = script_refusal(Separate, scale=torch.tensor(1.0))
    assert reason.startswith("tp: the body of the step uses scale itself: use it in the forward")


def test_a_line_says_that_a_script_was_not_tried_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert script_refusal(Fused, is_tried=False) is None
    assert "tp was not tried out: the body" in capsys.readouterr().err


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
