"""Unsuitable custom optimizers are refused before a run starts."""

from __future__ import annotations

import pytest
import torch

from pipelines.errors import UserError
from pipelines.loop.prepared.joined_optimizer import JoinedOptimizer
from pipelines.training.custom.optimizer_checks import refuse_unfit, uncut_parameters, why_not_split
from pipelines.training.workload.clipping import Clipping
from pipelines.training.workload.optimizer import BEGUN, state_shape, state_templates

NUM_DIMS = {"layer.weight": 2, "layer.bias": 1, "convolution": 4, "scalar": 0}


class FunctionOptimizing:
    """Turns a function of named parameters into an `OptimizerFactory`."""

    clipping = Clipping()

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
    "capturable": lambda p: torch.optim.AdamW(p, lr=0.1, capturable=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "custom groups": lambda p: torch.optim.AdamW(
        [
            {"params": [named for named in p if "bias" in named[0]], "lr": 0.3},
            {"params": [named for named in p if "bias" not in named[0]]},
        ],
        lr=0.1,
    ),
}


class Counting(torch.optim.SGD):
    """Counts its steps in its groups."""

    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


class Replacing(torch.optim.SGD):
    """Keeps a mean in a new tensor each step."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                old = state.get("mean", torch.zeros_like(parameter))
                state["mean"] = 0.9 * old + parameter.grad


class RowScaled(torch.optim.SGD):
    """Keeps one number for each row, of which no worker would have the others."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim == 2:
                    rows = self.state[parameter].setdefault(
                        "rows", parameter.new_zeros(len(parameter), 1)
                    )
                    rows += parameter.grad.square().mean(1, keepdim=True)
                    parameter.grad = parameter.grad / (1 + rows)
        super().step()


class Coupled(torch.optim.SGD):
    """Divides each update by the norm of all gradients."""

    def step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.grad = parameter.grad / norm
        super().step()


LATE = {
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "accumulated": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
}
"""Their first step is not that of a state of zeros."""


class RowNormed(torch.optim.SGD):
    """Divides the gradient of each row by its norm: only a cut of rows changes it."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim == 2:
                    parameter.grad = parameter.grad / parameter.grad.norm(dim=1, keepdim=True)
        super().step()


class Preconditioned(torch.optim.SGD):
    """Scales the gradient by sums of its products with itself on each side, as Shampoo does."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim == 2 and parameter.grad is not None:
                    self._precondition(parameter)
                elif parameter.ndim and parameter.grad is not None:
                    parameter.grad = parameter.grad / parameter.grad.norm()
        super().step()

    def _precondition(self, parameter):
        state, gradient = self.state[parameter], parameter.grad
        for key, product in (("left", gradient @ gradient.T), ("right", gradient.T @ gradient)):
            state.setdefault(key, torch.zeros_like(product)).add_(product)
        scale = state["left"].trace() + state["right"].trace()
        parameter.grad = (state["left"] @ gradient @ state["right"]) / scale.square()


WHOLE = {
    "cut rows": (lambda p: RowNormed(p, lr=0.1), {2}),
    "rows": (lambda p: RowScaled(p, lr=0.1), {2}),
    "norm": (lambda p: NormScaled(p, lr=0.1), {1, 2, 4}),
    "adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.1), {1, 2, 4}),
    "preconditioned": (lambda p: Preconditioned(p, lr=0.1), {1, 2, 4}),
}
"""With the numbers of dims of the parameters that they need whole."""


class Rateless(torch.optim.SGD):
    """Has no learning rate in its groups."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            del group["lr"]


UNFIT = {
    "Rateless: its groups have no lr": lambda p: Rateless(p, lr=0.1),
    "Counting: its step changes count of its groups": lambda p: Counting(p, lr=0.1),
    "Replacing: its step replaces mean instead of changing it": lambda p: Replacing(p, lr=0.1),
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
    assert not uncut_parameters(FunctionOptimizing(make), NUM_DIMS)


@pytest.mark.parametrize(("name", "make"), [*FIT.items(), *LATE.items()], ids=[*FIT, *LATE])
def test_state_says_whether_it_has_begun_only_where_that_matters(name: str, make) -> None:
    templates = state_templates(FunctionOptimizing(make), NUM_DIMS, torch.float64)
    assert {BEGUN in template for template in templates.values()} == {name in LATE}


@pytest.mark.parametrize("make", LATE.values(), ids=LATE)
def test_state_that_begins_late_is_accepted(make) -> None:
    refuse_unfit(FunctionOptimizing(make), NUM_DIMS)


@pytest.mark.parametrize(("make", "ndims"), WHOLE.values(), ids=WHOLE)
def test_parameters_that_no_axis_may_cut_are_found(make, ndims: set[int]) -> None:
    refuse_unfit(FunctionOptimizing(make), NUM_DIMS)
    expected = {name for name, ndim in NUM_DIMS.items() if ndim in ndims}
    assert uncut_parameters(FunctionOptimizing(make), NUM_DIMS) == expected


def test_only_the_groups_that_need_whole_parameters_are_found() -> None:
    """So that Muon's matrices have owners, and the rest, by AdamW, is cut."""

    def make(shards):
        matrices = [{"params": [t for _, t in shards if t.ndim == 2]}]
        others = [{"params": [t for _, t in shards if t.ndim != 2]}]
        return JoinedOptimizer([torch.optim.Muon(matrices), torch.optim.AdamW(others)])

    assert uncut_parameters(FunctionOptimizing(make), NUM_DIMS) == {"layer.weight"}


def at_rate_zero(make):
    """A schedule that begins with a rate of 0, as a linear warm-up may."""

    def build(shards):
        optimizer = make(shards)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return optimizer

    return FunctionOptimizing(build)


@pytest.mark.parametrize("name", ["dampening", "nadam", "asgd"])
def test_a_rate_of_zero_hides_no_late_begin(name: str) -> None:
    templates = state_templates(at_rate_zero(LATE[name]), NUM_DIMS, torch.float64)
    assert all(BEGUN in template for template in templates.values())


@pytest.mark.parametrize(("make", "ndims"), WHOLE.values(), ids=WHOLE)
def test_a_rate_of_zero_hides_no_need_of_whole_parameters(make, ndims: set[int]) -> None:
    assert uncut_parameters(at_rate_zero(make), NUM_DIMS)


def test_optimizer_that_couples_parameters_needs_all_of_them() -> None:
    why = why_not_split(FunctionOptimizing(lambda p: Coupled(p, lr=0.1)), NUM_DIMS)
    assert why is not None and "depends on other parameters" in why
    assert why_not_split(FunctionOptimizing(FIT["adam"]), NUM_DIMS) is None


def test_only_the_groups_that_begin_late_say_so() -> None:
    """So that a pipeline stage with some of the parameters has the same state."""

    def make(shards):
        groups = [
            {"params": [t for name, t in shards if "bias" in name], "dampening": 0.5},
            {"params": [t for name, t in shards if "bias" not in name]},
        ]
        return torch.optim.SGD([g for g in groups if g["params"]], lr=0.1, momentum=0.9)

    whole = state_templates(FunctionOptimizing(make), NUM_DIMS, torch.float64)
    assert {name for name, template in whole.items() if BEGUN in template} == {"layer.bias"}
    part = state_templates(FunctionOptimizing(make), {"layer.weight": 2}, torch.float64)
    assert part["layer.weight"].keys() == whole["layer.weight"].keys()


def test_factored_state_has_the_shape_of_the_parameter_but_for_sums() -> None:
    factory = FunctionOptimizing(WHOLE["adafactor"][0])
    template = state_templates(factory, {"layer.weight": 2}, torch.float64)["layer.weight"]
    assert state_shape(template["row_var"], (30, 40)) == (30, 1)
    assert state_shape(template["col_var"], (30, 40)) == (1, 40)
    assert state_shape(template["step"], (30, 40)) == ()


def test_preconditioners_have_sizes_of_the_parameter() -> None:
    factory = FunctionOptimizing(WHOLE["preconditioned"][0])
    template = state_templates(factory, {"layer.weight": 2}, torch.float64)["layer.weight"]
    assert state_shape(template["left"], (30, 40)) == (30, 30)
    assert state_shape(template["right"], (30, 40)) == (40, 40)


@pytest.mark.parametrize(("message", "make"), UNFIT.items(), ids=UNFIT)
def test_other_optimizers_are_refused_in_one_line(message: str, make) -> None:
    with pytest.raises(UserError, match=message) as refused:
        refuse_unfit(FunctionOptimizing(make), NUM_DIMS)
    assert "\n" not in str(refused.value)


def test_state_templates_have_the_dims_of_each_parameter() -> None:
    templates = state_templates(FunctionOptimizing(FIT["momentum"]), NUM_DIMS, torch.float64)
    assert {name: value["momentum_buffer"].ndim for name, value in templates.items()} == NUM_DIMS
    assert state_templates(FunctionOptimizing(FIT["sgd"]), NUM_DIMS, torch.float64)["scalar"] == {}
