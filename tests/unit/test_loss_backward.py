"""`loss.backward()` of a script: the step's in its body, torch's elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from test_loop import declare, loop_of, take
from torch.overrides import TorchFunctionMode

from pipelines.loop import Run, Step
from pipelines.loop.loop import Loop
from pipelines.loop.state.errors import LoopMisused


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
