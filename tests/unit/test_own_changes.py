"""A model whose forward pass changes its own parameters is found by one pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipelines.errors import UserError
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import load
from pipelines.settings.overrides import override
from pipelines.training.replica.own_changes import OwnChanges


class Changing(nn.Module):
    """Changes a weight in its forward pass, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.bounded = nn.Linear(3, 3)
        self.packed = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.how = how

    def forward(self, points: Tensor) -> Tensor:
        weight = self.bounded.weight
        match self.how:
            case "replaced data":  # equal values, as where a norm is within its bound
                weight.data = torch.renorm(weight.data, 2, 0, 1e9)
            case "data in place":
                weight.data.mul_(0.9)
            case "in place of integers":
                self.packed.data.add_(1)
            case "sign":  # which has the same norm
                weight.data.neg_()
            case "in place":
                with torch.no_grad():
                    weight.copy_(weight.clone())
        return self.norm(self.bounded(points))


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("replaced data", "bounded.weight"),
        ("data in place", "bounded.weight"),
        ("sign", "bounded.weight"),
        ("in place", "bounded.weight"),
        ("in place of integers", "packed"),
    ],
)
def test_changed_parameter_is_named(how: str, name: str) -> None:
    model = Changing(how)
    changes = OwnChanges([model])
    model(torch.randn(4, 3)).sum().backward()
    with pytest.raises(UserError, match=f"^{name}: the model changes"):
        changes.refuse()


def test_buffers_and_gradients_are_no_change() -> None:
    model = Changing("not at all")
    with torch.no_grad():
        model.bounded.weight[0, 0] = torch.nan
    changes = OwnChanges([model])
    model(torch.randn(4, 3)).sum().backward()
    changes.refuse()
    assert model.bounded.weight.grad is not None
    assert model.norm.num_batches_tracked == 1


@pytest.mark.parametrize("changes", [[], ["dtype=bfloat16"], ["offload=true"]])
def test_what_a_warm_up_itself_changes_is_not_the_models_change(changes: list[str]) -> None:
    settings = override(load("tiny"), ["data.source=random", *changes])
    program = TrainingProgram(settings.model_dump(mode="json"), device="cpu")
    program.warm_up()
    assert not torch.distributed.is_initialized()
