"""A script's own loop over its prepared loader: what ends a step there, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from test_loop import ListEngine, Microbatch, take
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from pipelines.loop import Run
from pipelines.loop.loop import Loop
from pipelines.loop.prepared.loader_loop import parts_of_batch
from pipelines.loop.script import script_of
from pipelines.loop.state.errors import LoopMisused
from pipelines.loop.step import Position
from pipelines.loop.trial import try_body
from pipelines.run.program import TrainingProgram
from pipelines.training.custom.custom_workload import CustomWorkload

POINTS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def whole_pass() -> ListEngine:
    """An engine of one pass, which has this worker's part of a batch."""
    return ListEngine(Microbatch(POINTS, 2))


def prepared(run: Run, batch_size: int = 4) -> tuple[nn.Module, Any, Any]:
    model = nn.Linear(2, 1, bias=False)
    loader = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=batch_size)
    return run.prepare(model, SGD(model.parameters(), lr=0.5), loader)


def script_with(body: Callable[[Run, Any, Any, Tensor], None]) -> Callable[[Run], None]:
    def script(run: Run) -> None:
        model, optimizer, loader = prepared(run)
        for _ in run.range(2):
            for points in loader:
                body(run, model, optimizer, points)

    return script


def losses(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).mean()


def train(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    losses(model, batch).backward()
    optimizer.step()


def test_parts_of_a_batch_divide_it() -> None:
    sizes = {1: 1, 2: 2, 12: 12, 24: 24, 64: 32, 100: 25, 96: 32, 37: 37, 8: 8}
    assert {size: parts_of_batch(size, [nn.Linear(2, 1)]) for size in sizes} == sizes
    normalized = {64: 8, 12: 6, 100: 5, 37: 1}
    assert {size: parts_of_batch(size, [nn.BatchNorm2d(3)]) for size in normalized} == normalized


def test_declaration_has_whole_batches_of_the_loader() -> None:
    script = script_of(script_with(train))
    assert (script.settings.batch, script.settings.microbatch, script.settings.steps) == (4, 1, 6)


def test_optimizer_step_ends_the_step_and_the_loss_is_that_of_all_workers() -> None:
    seen: SimpleQueue[Any] = SimpleQueue()

    def body(run: Run, model: nn.Module, optimizer: Any, points: Tensor) -> None:
        optimizer.zero_grad()
        loss = losses(model, points)
        seen.put((run.step.number, run.step.committed, round(loss.detach().item(), 4)))
        loss.backward()
        optimizer.step()
        seen.put((run.step.number, run.step.committed, loss.item()))

    loop = Loop(script_with(body), 0)
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, 1.0)
    [first] = take(loop, engine=whole_pass(), module=module, commits=False)
    assert (float(first.loss), float(first.num_tokens)) == (10.0, 2.0)
    loop.commit(1, Position(), is_last=False, loss=7.0)
    loop.await_arrival()
    assert [seen.get() for _ in range(2)] == [(1, False, 5.0), (1, True, 7.0)]
    take(loop, 2, engine=whole_pass(), module=module, commits=False)
    assert seen.get() == (2, False, 5.0)
    loop.begin(2, Position(), lambda: loop.state.kept())
    loop.await_arrival()
    assert seen.get() == (2, False, 7.0), "as of the step before, in a step that comes again"


def test_sum_over_the_samples_counts_as_such() -> None:
    def script(run: Run) -> None:
        model, optimizer, loader = prepared(run)
        for _ in run.range(2, reduction="sum"):
            for points in loader:
                model(points).sum().backward()
                optimizer.step()

    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, 1.0)
    [part] = take(Loop(script, 0), engine=whole_pass(), module=module)
    mean = float(part.loss) / float(part.num_tokens)
    assert mean == 10.0 * 4 / 2, "as if the other two samples of the batch had the same losses"


def test_scaled_loss_is_shown_without_its_scale() -> None:
    seen: SimpleQueue[float] = SimpleQueue()

    def script(run: Run) -> None:
        model, optimizer, loader = prepared(run)
        scaler = run.prepare(GradScaler("cpu"))
        for _ in run.range(2):
            for points in loader:
                loss = losses(model, points)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                seen.put(loss.item())

    loop = Loop(script, 0)
    take(loop, engine=whole_pass(), commits=False)
    loop.commit(1, Position(), is_last=False, loss=0.5)
    loop.await_arrival()
    assert seen.get() == 0.5


def accumulate(run: Run, model: nn.Module, optimizer: Any, points: Tensor) -> None:
    losses(model, points).backward()
    if run.step.number % 2 == 0:
        optimizer.step()


def reads_ahead(run: Run) -> None:
    model, optimizer, loader = prepared(run)
    for _ in run.range(2):
        batches = iter(loader)
        ahead = next(batches)
        for _ in range(2):
            points, ahead = ahead, next(batches)
            train(run, model, optimizer, points)


def forgets_backward(run: Run, model: nn.Module, optimizer: Any, points: Tensor) -> None:
    losses(model, points)
    optimizer.step()


def looks_first(run: Run, model: nn.Module, optimizer: Any, points: Tensor) -> None:
    loss = losses(model, points)
    float(loss)
    loss.backward()
    optimizer.step()


def looks_early(run: Run, model: nn.Module, optimizer: Any, points: Tensor) -> None:
    loss = losses(model, points)
    loss.backward()
    loss.item()
    optimizer.step()


def takes_other_loader(run: Run) -> None:
    loader = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=4)
    model = nn.Linear(2, 1, bias=False)
    run.prepare(model, SGD(model.parameters(), lr=0.5), loader)
    for _ in run.range(2):
        for [points] in loader:
            assert len(points)


def leaves_in_step(run: Run) -> None:
    model, _, loader = prepared(run)
    for _ in run.range(1):
        for points in loader:
            if len(points):
                break
            model(points)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (script_with(accumulate), r"step 1: the loop over the loader reads a batch before optimi"),
        (reads_ahead, r"step 1: a microbatch got no `step.backward"),
        (script_with(forgets_backward), r"step 1: a microbatch got no `step.backward\(loss\)`"),
        (
            script_with(looks_first),
            r"step 1: loss.item\(\) in front of optimizer.step\(\), where it",
        ),
        (
            script_with(looks_early),
            r"step 1: loss.item\(\) in front of optimizer.step\(\), where it",
        ),
        (
            takes_other_loader,
            r"epoch 0: its loop over the loader has not run: loop over the loader",
        ),
        (leaves_in_step, r"step 1: a microbatch got no `step.backward\(loss\)`"),
    ],
)
def test_iteration_that_is_no_step_is_refused(script: Any, message: str) -> None:
    with pytest.raises(LoopMisused, match=message):
        take(Loop(script, 0), engine=whole_pass(), commits=False)


def other_reduction(run: Run, reduction: Any = "none") -> None:
    prepared(run)
    next(run.range(2, reduction=reduction))


def empty_range(run: Run) -> None:
    prepared(run)
    next(run.range(3, 3))


def no_loader(run: Run) -> None:
    model = nn.Linear(2, 1)
    run.prepare(model, SGD(model.parameters(), lr=0.5))
    next(run.range(3))


def step_too_early(run: Run) -> None:
    run.step  # noqa: B018


def state_in_range(run: Run) -> None:
    prepared(run)
    run.state(torch.zeros(2))
    next(run.range(2))


def uneven_parts(run: Run) -> None:
    prepared(run)
    next(run.range(3, microbatches=3))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (other_reduction, r"""run.range: reduction='none': give "mean" or "sum\""""),
        (empty_range, r"num_epochs=0 must be a whole number from 1 on"),
        (no_loader, r"pass run.prepare the loader first"),
        (step_too_early, r"run.step: no step has begun"),
        (state_in_range, r"run.range: run.state needs single microbatches"),
        (uneven_parts, r"batch_size=4 is no multiple of microbatches=3"),
    ],
)
def test_wrong_declaration_is_refused(script: Any, message: str) -> None:
    with pytest.raises(LoopMisused, match=message):
        script_of(script)


def note_on(
    loss: Callable[[Tensor], Tensor], model: nn.Module | None = None, **options: Any
) -> Any:
    """What is noted on this loss of the model's output before the run."""

    def script(run: Run) -> None:
        made = model or nn.Linear(2, 1)
        loader = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=4)
        made, optimizer, loader = run.prepare(made, SGD(made.parameters(), lr=0.5), loader)
        for _ in run.range(1, **options):
            for [points] in loader:
                loss(made(points)).backward()
                optimizer.step()

    declared = script_of(script)
    program = TrainingProgram(
        declared.settings.model_dump(mode="json"), device="cpu", recipe=declared
    )
    assert program.loop is not None and isinstance(program.workload, CustomWorkload)
    return try_body(program.loop, program.workload)


def test_loss_that_depends_on_the_number_of_workers_is_noted() -> None:
    assert note_on(lambda output: output.square().mean()) is None
    assert note_on(lambda output: output.square().sum(), reduction="sum") is None
    note = note_on(lambda output: output.square().sum())
    assert 'if it is a sum over the samples, give run.range(..., reduction="sum")' in note
    assert note_on(lambda output: (output - output.mean()).square().mean(), microbatches=2)
    assert note_on(lambda output: output.std(), microbatches=1) is None
    fixed = torch.arange(4.0)
    assert note_on(lambda output: (output[:, 0] * fixed).mean(), microbatches=1) is None
