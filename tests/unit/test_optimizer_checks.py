"""Unsuitable custom optimizers are refused before a run starts."""

from __future__ import annotations

import pytest
import torch

from pipelines.errors import UserError
from pipelines.training.custom.optimizer_checks import refuse_unfit
from pipelines.training.workload.optimizer import state_templates

NUM_DIMS = {"layer.weight": 2, "layer.bias": 1, "convolution": 4, "scalar": 0}


class FunctionOptimizing:
    """Turns a function of named parameters into an `OptimizerFactory`."""

    max_grad_norm = None

    def __init__(self, make):
        self.make = make

    def build(self, shards):
        return self.make(shards)

    def rate(self, step):
        return 1.0


class NormScaled(torch.optim.SGD):
    """Like LARS: the update of a parameter depends on its norm."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad * parameter.norm()
        super().step()


FIT = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "custom groups": lambda p: torch.optim.AdamW(
        [
            {"params": [named for named in p if "bias" in named[0]], "lr": 0.3},
            {"params": [named for named in p if "bias" not in named[0]]},
        ],
        lr=0.1,
    ),
}
UNFIT = {
    "zeros": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "depends on others": lambda p: NormScaled(p, lr=0.1),
    "of shape": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("make", FIT.values(), ids=FIT)
def test_elementwise_optimizer_is_accepted(make) -> None:
    refuse_unfit(FunctionOptimizing(make), NUM_DIMS)


@pytest.mark.parametrize(("message", "make"), UNFIT.items(), ids=UNFIT)
def test_other_optimizers_are_refused_in_one_line(message: str, make) -> None:
    with pytest.raises(UserError, match=message) as refused:
        refuse_unfit(FunctionOptimizing(make), NUM_DIMS)
    assert "\n" not in str(refused.value)


def test_state_templates_have_the_dims_of_each_parameter() -> None:
    templates = state_templates(FunctionOptimizing(FIT["momentum"]), NUM_DIMS, torch.float64)
    assert {name: value["momentum_buffer"].ndim for name, value in templates.items()} == NUM_DIMS
    assert state_templates(FunctionOptimizing(FIT["sgd"]), NUM_DIMS, torch.float64)["scalar"] == {}
