"""`loss.backward()` and clipping of a script: the step's in its body, torch's elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from test_loop import ListEngine, Microbatch, declare, loop_of, take
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.overrides import TorchFunctionMode

from pipelines.loop import Run, Step
from pipelines.loop.loop import Loop
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.step import Position
from pipelines.training.workload.clipping import Clipping


class Passing(TorchFunctionMode):
    """Torch calls the methods of tensors by their names again."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [nullcontext(), Passing()])
def test_backward_of_a_loss_is_that_of_the_step_in_its_body_only(
    mode: AbstractContextManager[object],
) -> None:
    weight, noise = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def script(run: Run) -> None:
        declare(run)
        for step in run.steps(3):
            with step, mode:
                for points in step.batches():
                    (3 * noise.sum()).backward(inputs=[noise])
                    (points @ weight).mean().backward()
            noise.sum().backward()

    loop = Loop(script, 0)
    sums = take(loop)
    assert [(float(part.loss), int(part.num_tokens)) for part in sums] == [(10.0, 2), (0.0, 0)]
    assert weight.grad is not None and weight.grad.tolist() == [4.0, 6.0]
    assert noise.grad is not None and noise.grad.tolist() == [7.0, 7.0]


@pytest.mark.parametrize(
    ("losses", "message"), [(1, "a microbatch has one backward pass"), (2, "once for each of")]
)
def test_other_backward_pass_of_a_microbatch_is_refused(losses: int, message: str) -> None:
    """One with a gradient of its own, and a second one, whose gradients would have no weight."""
    weight = torch.ones(2, requires_grad=True)

    def body(step: Step) -> None:
        for points in step.batches():
            for _ in range(losses):
                loss = (points @ weight).mean()
                loss.backward(torch.ones(()) if losses == 1 else None)

    with pytest.raises(LoopMisused, match=message):
        take(loop_of(body))


def clip_in(step: Step, run: Run, model: nn.Module, max_norm: float = 0.5, **options: Any) -> None:
    for points in step.batches():
        model(points).mean().backward()
        norm = clip_grad_norm_(model.parameters(), max_norm, **options)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.25)
        seen.put(norm)


seen: SimpleQueue[torch.Tensor] = SimpleQueue()


def clipping_loop(**options: Any) -> Loop:
    limits = {name: options.pop(name) for name in [*options] if name.startswith("max_grad")}

    def script(run: Run) -> None:
        model, *_ = declare(run)
        for step in run.steps(3, **limits):
            with step:
                clip_in(step, run, model, **options)

    return Loop(script, 0)


def test_clipping_in_the_body_is_that_of_the_whole_step() -> None:
    """The function was imported by its name, before a loop began."""
    loop = clipping_loop()
    factory = loop.declaration.optimizer_factory
    assert factory.clipping == Clipping()
    take(loop, engine=ListEngine(Microbatch(torch.ones(2, 2), 2)), commits=False)
    assert factory.clipping == Clipping(0.5, 0.25)
    loop.commit(1, Position(), is_last=False, loss=1.0, grad_norm=3.0)
    loop.await_arrival()
    assert float(seen.get()) == 3.0
    assert factory.clipping == Clipping(), "the next step is clipped only if its body does so"
    assert 0.5 in loop.state.fingerprint and 0.25 in loop.state.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_type": 1.0}, "the run clips by the 2-norm: leave out norm_type"),
        ({"max_grad_norm": 1.0}, "given max_grad_norm or max_grad_value, too: keep one of them"),
    ],
)
def test_other_clipping_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(LoopMisused, match=message):
        take(clipping_loop(**options), engine=ListEngine(Microbatch(torch.ones(2, 2), 2)))


def test_clipping_of_other_tensors_is_torchs_own() -> None:
    noise = torch.ones(2, requires_grad=True)

    def body(step: Step) -> None:
        for _ in step.batches():
            step.backward(torch.ones((), requires_grad=True) * 1)
            noise.grad = torch.full((2,), 3.0)
            clip_grad_norm_([noise], 1.0)

    take(loop_of(body))
    assert noise.grad is not None and float(noise.grad.norm()) == pytest.approx(1.0, rel=1e-5)
