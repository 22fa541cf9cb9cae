"""Scripts with unusual optimizers, and their plain loops: several, slow to begin, of matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from loops import NUM_MICROBATCHES, NUM_STEPS, build_training, plain
from script_habits import compute, note_values
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adafactor, AdamW, Muon, NAdam, Optimizer, Rprop
from torch.optim.lr_scheduler import LambdaLR, StepLR

from pipelines.loop import Run

Made = list[Optimizer]
SAVED_EVERY = 6


def begins_late(model: nn.Module) -> Made:
    """Three optimizers whose first step is not that of a state of zeros."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [
        NAdam(matrices[1:], lr=0.01),
        SGD(others, lr=0.1, momentum=0.9, dampening=0.5),
        ASGD(matrices[:1], lr=0.1, t0=3),
    ]


def of_signs(model: nn.Module) -> Made:
    return [Rprop(model.parameters(), lr=0.01)]


def of_matrices(model: nn.Module) -> Made:
    """The usual pair."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [Muon(matrices, lr=0.02), AdamW(others, lr=0.01)]


def factored(model: nn.Module) -> Made:
    return [Adafactor(model.parameters(), lr=0.05)]


class Preconditioned(SGD):
    """Scales gradients by sums of their products with themselves, as Shampoo does (Gupta et al.,
    2018), and begins with unit matrices."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim == 2:
                    self._scale(parameter)
        super().step()

    @torch.no_grad()
    def _scale(self, parameter: Tensor) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        for key, size in (("left", 0), ("right", 1)):
            state.setdefault(key, torch.eye(parameter.shape[size], dtype=gradient.dtype))
        state.setdefault("step", torch.zeros(()))
        state["step"] += 1
        state["left"] += gradient @ gradient.T
        state["right"] += gradient.T @ gradient
        solved = torch.linalg.solve(state["left"], gradient)
        parameter.grad = torch.linalg.solve(state["right"], solved.T).T * state["step"].sqrt()


def preconditioned(model: nn.Module) -> Made:
    return [Preconditioned(model.parameters(), lr=0.1, momentum=0.9)]


class Coupled(SGD):
    """Clips the gradients of all parameters together, within its step."""

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


def coupled(model: nn.Module) -> Made:
    return [Coupled(model.parameters(), lr=0.1)]


def train(run: Run, make: Callable[[nn.Module], Made]) -> None:
    model, _, _, loader = build_training(is_scheduled=False)
    optimizers = make(model)
    scheduler = StepLR(optimizers[-1], 4, gamma=0.8)
    model, *optimizers, scheduler, loader = run.prepare(model, *optimizers, scheduler, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        if step.committed and step.number % SAVED_EVERY == 0 and step.is_first_worker:
            states = [optimizer.state_dict() for optimizer in optimizers]
            note_values(step.number, "optimizers", dict(enumerate(states)))


class Several:
    """Optimizers that a plain loop steps one after another."""

    def __init__(self, optimizers: Made) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def plain_losses(make: Callable[[nn.Module], Made]) -> list[float]:
    return [loss for loss, _ in plain_steps(make)]


def plain_steps(make: Callable[[nn.Module], Made]) -> Iterator[tuple[float, list[Any]]]:
    """The loss of each step, and the states of the optimizers after it."""
    model, _, _, loader = build_training(is_scheduled=False)
    optimizers = make(model)
    scheduler = StepLR(optimizers[-1], 4, gamma=0.8)
    both: Any = Several(optimizers)
    for loss in plain(model, both, scheduler, loader, NUM_STEPS, NUM_MICROBATCHES):
        yield loss, [deepcopy(optimizer.state_dict()) for optimizer in optimizers]


MAX_GRAD_NORM, MAX_GRAD_VALUE = 0.5, 0.05
"""Both have an effect in each step."""


def train_clipped(run: Run) -> None:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    limits = {"max_grad_norm": MAX_GRAD_NORM, "max_grad_value": MAX_GRAD_VALUE}
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES, **limits):
        with step:
            compute(step, model)


def plain_clipped() -> Iterator[float]:
    model, optimizer, _, loader = build_training(is_scheduled=False)

    def clip(*_: Any) -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        largest = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
        assert norm > MAX_GRAD_NORM and largest > MAX_GRAD_VALUE
        nn.utils.clip_grad_value_(model.parameters(), MAX_GRAD_VALUE)

    optimizer.register_step_pre_hook(clip)
    yield from plain(model, optimizer, None, loader, NUM_STEPS, NUM_MICROBATCHES)


def train_early_schedule(run: Run) -> None:
    """The scheduler is stepped before the optimizer, as in old scripts."""
    model, optimizer, _, loader = build_training(is_scheduled=False)
    scheduler = LambdaLR(optimizer, lambda step: (step + 1) / 12)
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
    for step in run.steps(NUM_STEPS, microbatches=NUM_MICROBATCHES):
        with step:
            compute(step, model)
            scheduler.step()
            optimizer.step()


def plain_early_schedule() -> Iterator[float]:
    model, optimizer, _, loader = build_training(is_scheduled=False)
    scheduler = LambdaLR(optimizer, lambda step: (step + 1) / 12)
    scheduler.step()
    yield from plain(model, optimizer, scheduler, loader, NUM_STEPS, NUM_MICROBATCHES)


def train_begins_late(run: Run) -> None:
    train(run, begins_late)


def train_of_signs(run: Run) -> None:
    train(run, of_signs)


def train_of_matrices(run: Run) -> None:
    train(run, of_matrices)


def train_factored(run: Run) -> None:
    train(run, factored)


def train_preconditioned(run: Run) -> None:
    train(run, preconditioned)


def train_coupled(run: Run) -> None:
    train(run, coupled)
