"""Checks of custom optimizers: unsuitable ones are refused before a run starts."""

from __future__ import annotations

import pytest
import torch

from pipelines.settings.errors import UserError
from pipelines.training.custom.optimizer_checks import refuse_unfit
from pipelines.training.workload.optimizer import state_templates

NUM_DIMS = {"layer.weight": 2, "layer.bias": 1, "convolution": 4, "scalar": 0}


class Of:
    """A function of named parameters as `Optimizing`."""

    max_grad_norm = None

    def __init__(self, make):
        self.make = make

    def build(self, shards):
        return self.make(shards)

    def rate(self, step):
        return 1.0


class Normed(torch.optim.SGD):
    """Like LARS: a parameter's update depends on its norm."""

    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                one.grad = one.grad * one.norm()
        super().step()


FIT = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "groups of its own": lambda p: torch.optim.AdamW(
        [
            {"params": [one for one in p if "bias" in one[0]], "lr": 0.3},
            {"params": [one for one in p if "bias" not in one[0]]},
        ],
        lr=0.1,
    ),
}
UNFIT = {
    "zeros": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "depends on others": lambda p: Normed(p, lr=0.1),
    "of shape": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("make", FIT.values(), ids=FIT)
def test_an_elementwise_optimizer_is_accepted(make) -> None:
    refuse_unfit(Of(make), NUM_DIMS)


@pytest.mark.parametrize(("told", "make"), UNFIT.items(), ids=UNFIT)
def test_other_optimizers_are_refused_in_one_line(told: str, make) -> None:
    with pytest.raises(UserError, match=told) as refused:
        refuse_unfit(Of(make), NUM_DIMS)
    assert "\n" not in str(refused.value)


def test_the_state_of_each_parameter_is_determined() -> None:
    kept = state_templates(Of(FIT["momentum"]), NUM_DIMS, torch.float64)
    assert {name: value["momentum_buffer"].ndim for name, value in kept.items()} == NUM_DIMS
    assert state_templates(Of(FIT["sgd"]), NUM_DIMS, torch.float64)["scalar"] == {}
