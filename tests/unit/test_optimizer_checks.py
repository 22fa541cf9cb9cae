"""Unsuitable custom optimizers are refused before a run starts."""

from __future__ import annotations

import pytest
import torch

from pipelines.errors import UserError
from pipelines.training.custom.optimizer_checks import refuse_unfit, why_not_sharded
from pipelines.training.workload.optimizer import BEGUN, state_shape, state_templates

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
LATE = {
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "accumulated": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
}
"""Their first step is not that of a state of zeros."""
WHOLE = {
    "norm": lambda p: NormScaled(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
UNFIT = {
    "optimizer LBFGS: its step needs a closure": lambda p: torch.optim.LBFGS([t for _, t in p]),
    "SparseAdam: a step on small tensors failed: SparseAdam does not support dense": (
        lambda p: torch.optim.SparseAdam(p, lr=0.1)
    ),
    "keeps odd of shape": lambda p: OddState(p, lr=0.1),
}


class OddState(torch.optim.SGD):
    """Keeps state of a shape that depends on nothing that a run knows."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = torch.zeros(7)


@pytest.mark.parametrize("make", FIT.values(), ids=FIT)
def test_elementwise_optimizer_is_accepted(make) -> None:
    refuse_unfit(FunctionOptimizing(make), NUM_DIMS)


@pytest.mark.parametrize("make", [*FIT.values(), *LATE.values()], ids=[*FIT, *LATE])
def test_elementwise_optimizer_may_be_sharded(make) -> None:
    assert why_not_sharded(FunctionOptimizing(make), NUM_DIMS) is None


@pytest.mark.parametrize(("name", "make"), [*FIT.items(), *LATE.items()], ids=[*FIT, *LATE])
def test_state_says_whether_it_has_begun_only_where_that_matters(name: str, make) -> None:
    templates = state_templates(FunctionOptimizing(make), NUM_DIMS, torch.float64)
    assert {BEGUN in template for template in templates.values()} == {name in LATE}


@pytest.mark.parametrize("make", LATE.values(), ids=LATE)
def test_state_that_begins_late_is_accepted(make) -> None:
    refuse_unfit(FunctionOptimizing(make), NUM_DIMS)


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_optimizer_of_whole_parameters_may_not_be_sharded(make) -> None:
    refuse_unfit(FunctionOptimizing(make), NUM_DIMS)
    why = why_not_sharded(FunctionOptimizing(make), NUM_DIMS)
    assert why is not None and "needs whole parameters: use dp" in why


def test_factored_state_has_the_shape_of_the_parameter_but_for_sums() -> None:
    factory = FunctionOptimizing(WHOLE["adafactor"])
    template = state_templates(factory, {"layer.weight": 2}, torch.float64)["layer.weight"]
    assert state_shape(template["row_var"], (30, 40)) == (30, 1)
    assert state_shape(template["col_var"], (30, 40)) == (1, 40)
    assert state_shape(template["step"], (30, 40)) == ()


@pytest.mark.parametrize(("message", "make"), UNFIT.items(), ids=UNFIT)
def test_other_optimizers_are_refused_in_one_line(message: str, make) -> None:
    with pytest.raises(UserError, match=message) as refused:
        refuse_unfit(FunctionOptimizing(make), NUM_DIMS)
    assert "\n" not in str(refused.value)


def test_state_templates_have_the_dims_of_each_parameter() -> None:
    templates = state_templates(FunctionOptimizing(FIT["momentum"]), NUM_DIMS, torch.float64)
    assert {name: value["momentum_buffer"].ndim for name, value in templates.items()} == NUM_DIMS
    assert state_templates(FunctionOptimizing(FIT["sgd"]), NUM_DIMS, torch.float64)["scalar"] == {}
