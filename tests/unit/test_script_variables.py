"""What a script counts itself, when a step comes again and when the script begins again."""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import test_loop
import torch
from test_loop import MODULE, ListEngine, Microbatch, compute, declare, take

from pipelines.loop import Run
from pipelines.loop.loop import Loop
from pipelines.loop.state.reached_objects import MOST_PARTS, MOST_REACHED, items_of, reached
from pipelines.loop.state.variable_tables import table_of
from pipelines.loop.step import Position, Step

num_bodies = 0
names: list[str] = []


class Counter:
    def __init__(self) -> None:
        self.count, self.total, self.is_new = 0, 0.0, True


class Trainer:
    """As a trainer that holds a scheduler of its own in a list."""

    def __init__(self) -> None:
        self.parts: list[Any] = [{"counter": Counter()}]

    @property
    def counter(self) -> Counter:
        counter: Counter = self.parts[0]["counter"]
        return counter

    def count(self, step: Step) -> None:
        global num_bodies
        compute(step)
        num_bodies += 1
        self.counter.count += 1
        self.counter.total += 0.5


@dataclass(slots=True)
class Slots:
    count: int = 0


class Shared:
    count = 0


def counter() -> Callable[[], int]:
    """A function with a variable of its own."""
    count = 0

    def add() -> int:
        nonlocal count
        count += 1
        return count

    return add


class Average:
    """As the meters of a training function, with a window of the latest values."""

    def __init__(self) -> None:
        self.sum, self.window = torch.zeros(()), deque[float](maxlen=2)

    def update(self, value: float) -> None:
        self.sum += value
        self.window.append(value)


def _through_a_bar(steps: Iterable[Step]) -> Iterator[Step]:
    """As a progress bar."""
    yield from steps


class _Pulled:
    """As the prefetcher of data."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        return next(self._steps)


def _numbered(steps: Iterable[Step]) -> Iterable[tuple[int, Step]]:
    return enumerate(steps, start=1)


def test_enumerated_steps_have_their_numbers_on_a_worker_that_joins() -> None:
    def script(run: Run) -> None:
        declare(run)
        for number, step in _numbered(_Pulled(_through_a_bar(run.steps(9)))):
            with step:
                assert number == step.number
                compute(step)

    loop = Loop(script, 0)
    gc.freeze()  # as a worker does after its warm-up
    try:
        for number, commits in ((5, True), (6, False), (6, True), (7, True)):
            take(loop, number, commits)
    finally:
        gc.unfreeze()


def train_epoch(
    steps: Iterable[Step], trainer: Trainer, seen: SimpleQueue[tuple[Any, ...]], losses: list[int]
) -> None:
    """Local variables of a function that has the loop over steps, and objects that it makes."""
    average, history = Average(), {"count": 0, "best": None}
    matrix, counts = torch.zeros(10, 10), np.zeros(10)
    slots, add, sums, window = Slots(), counter(), [0.0, 0.0], list[int]()
    Shared.count, long_list, buffer = 0, ["a name"] * 1000, list[int]()
    flushed = SimpleQueue[int]()
    meters = defaultdict[str, Average](Average)
    num_steps, total, is_new = 0, torch.zeros(()), True
    for index, step in enumerate(_through_a_bar(steps)):
        with step:
            trainer.count(step)
            names.append("body")
        matrix[0, 1] += 1
        counts[1] += 1
        slots.count += 1
        Shared.count += 1
        sums[0] += 1
        window = [*window, index]
        buffer.append(index)
        if len(buffer) == 2:
            flushed.put(sum(buffer))
            buffer = []
        assert matrix.sum() == counts.sum() == index + 1 == add() == len(long_list) - 999
        assert slots.count == Shared.count == sums[0] == len(window) == index + 1
        long_list.append("another")
        num_steps += 1  # noqa: SIM113
        assert index == num_steps - 1
        total += step.number
        losses.append(step.number)
        average.update(step.number)
        meters["number"].update(step.number)
        assert meters["number"].window == average.window
        history["count"] += 1
        history["best"] = step.number
        seen.put((step.number, num_steps, float(total), len(losses), is_new, *history.values()))
        seen.put((float(average.sum), *average.window))
        is_new = False
    assert {flushed.get_nowait() for _ in range(flushed.qsize())} == {1}


def test_variables_are_set_back_when_a_step_comes_again() -> None:
    seen = SimpleQueue[tuple[Any, ...]]()
    trainer = Trainer()

    def script(run: Run) -> None:
        declare(run)
        num_epochs, losses = 0, [0]
        for index, (_, steps) in enumerate(run.epochs(2, steps_per_epoch=2)):
            num_epochs += 1  # noqa: SIM113
            assert index == num_epochs - 1
            train_epoch(steps, trainer, seen, losses)
            seen.put((num_epochs, trainer.counter.count, num_bodies))

    loop = Loop(script, 0)
    for number, commits in ((1, False), (1, True), (2, False), (2, True), (3, False), (3, False)):
        take(loop, number, commits)
    take(loop, 3)
    take(loop, 4)
    first, second = (1, 1, 1.0, 2, True, 1, 1), (2, 2, 3.0, 3, False, 2, 2)
    third, fourth = (3, 1, 3.0, 4, True, 1, 3), (4, 2, 7.0, 5, False, 2, 4)
    assert [seen.get_nowait() for _ in range(seen.qsize())] == [
        *[first, (1.0, 1)] * 2,
        *[second, (3.0, 1, 2)] * 2,
        (1, 2, 2),
        *[third, (3.0, 3)] * 3,
        *[fourth, (7.0, 3, 4)],
        (2, 4, 4),
    ]
    assert trainer.counter.total == 2.0 and names == ["body"] * 4


def test_code_at_the_top_of_an_epoch_is_not_undone() -> None:
    """A step that comes again begins with what that code has changed. A worker that joins within
    the epoch has it from the others, although its script runs the code then."""
    optimizers: list[torch.optim.Optimizer] = []

    def script(run: Run) -> None:
        _, optimizer, _ = declare(run)
        optimizers.append(optimizer)
        kept = {"epochs": 0}
        run.keep(kept)
        for epoch, (_, steps) in enumerate(run.epochs(3, steps_per_epoch=2)):
            kept["epochs"] += 1
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            for index, step in enumerate(steps):
                with step:
                    assert (epoch, index) == divmod(step.number - 1, 2)
                    compute(step)

    loop, joining = Loop(script, 0), Loop(script, 0)
    own, other = optimizers
    for number, commits, rate in ((1, False, 0.25), (1, True, 0.25), (2, True, 0.125)):
        take(loop, number, commits)
        assert own.param_groups[0]["lr"] == rate
    for number, commits in ((3, False), (3, False), (3, True)):
        take(loop, number, commits)
        assert own.param_groups[0]["lr"] == 0.125
    values = loop.state.kept()
    joining.begin(4, Position(), lambda: values)
    joining.await_arrival()
    assert (joining.compute(ListEngine(Microbatch(torch.ones(2), 2)), MODULE))[0].num_tokens == 2
    assert other.param_groups[0]["lr"] == 0.125
    assert joining.state.live()["/0/epochs"] == 2


def test_what_stands_behind_a_step_needs_not_ask_whether_it_has_committed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It prints once, and a variable that the body did not come to set ends no run."""

    def script(run: Run) -> None:
        declare(run)
        for step in run.steps(4):
            with step:
                compute(step)
                is_over = True
            run.print(f"step {step.number}: {is_over}")

    loop = Loop(script, 0)
    loop.is_first_worker = True
    with pytest.raises(RuntimeError, match="none is left"):
        take(loop, 1, engine=_Broken(Microbatch(None, 1)))
    take(loop, 1, commits=False)
    take(loop, 1)
    *_, begun_again, printed = capsys.readouterr().out.splitlines()
    assert begun_again.startswith("elastic: step 1: the script begins again on this worker")
    assert printed == "step 1: True"


def test_globals_of_a_module_of_the_user_are_set_back_and_new_ones_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a module that a function imports, which is not imported again."""
    monkeypatch.setattr(test_loop, "count", 1, raising=False)
    monkeypatch.setattr(test_loop, "imported", test_loop, raising=False)
    table = table_of(test_loop)
    assert table is not None and table["count"] == 1
    table["count"] = 2
    del table["imported"]
    assert vars(test_loop)["count"] == 2 and vars(test_loop)["imported"] is test_loop
    assert table_of(pytest) is None


class _Broken(ListEngine):
    """An engine whose groups break before the first microbatch."""

    def next(self) -> Microbatch:
        raise RuntimeError("none is left")


def test_script_that_begins_again_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def script(run: Run) -> None:
        declare(run)
        for step in run.steps(4):
            with step:
                compute(step)

    loop = Loop(script, 0)
    loop.restart_script(at=1)
    assert not capsys.readouterr().out, "it has begun no step"
    take(loop, 1)
    loop.restart_script(at=2)
    line = "elastic: step 2: the script begins again on this worker, so variables that are not part"
    assert capsys.readouterr().out.startswith(line)


def test_the_nearest_objects_of_a_script_are_reached_and_no_more_than_the_most() -> None:
    near = [[object() for _ in range(MOST_PARTS + 1)] for _ in range(2 * MOST_PARTS)]
    objects = [*reached(near, 2, items_of)]
    assert objects[: len(near)] == near and len(objects) == MOST_REACHED
    alone = [*reached(near[:1], 2, items_of)]
    assert alone == [near[0], *near[0][:MOST_PARTS]]
