"""What a script counts itself, when a step comes again and when the script begins again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_loop import declare, take

from pipelines.loop import Run
from pipelines.loop.loop import Loop
from pipelines.loop.state.reached_objects import MOST_PARTS, MOST_REACHED, reached
from pipelines.loop.step import Step

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
        for points in step.batches():
            step.backward(points.sum() * torch.ones((), requires_grad=True))
        num_bodies += 1
        self.counter.count += 1
        self.counter.total += 0.5


def test_numbers_are_set_back_when_a_step_comes_again() -> None:
    seen = []
    trainer = Trainer()
    local = Counter()

    def script(run: Run) -> None:
        declare(run)
        held, own = trainer, local
        for step in run.steps(4):
            with step:
                held.count(step)
                own.is_new = False
                names.append("body")
            own.count += 1
            seen.append((step.number, held.counter.count, num_bodies, own.count))

    loop = Loop(script, 0)
    for number, commits in ((1, True), (2, False), (2, False), (2, True), (3, True)):
        take(loop, number, commits)
    numbers = [1, 2, 2, 2, 3]
    assert seen == [(number, number, number, number) for number in numbers]
    assert trainer.counter.total == 1.5 and not local.is_new
    assert len(names) == 5, "only numbers are set back"


def test_script_that_begins_again_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def script(run: Run) -> None:
        declare(run)
        for step in run.steps(4):
            with step:
                for points in step.batches():
                    step.backward(points.sum() * torch.ones((), requires_grad=True))

    loop = Loop(script, 0)
    loop.restart_script(at=1)
    assert not capsys.readouterr().out, "it has begun no step"
    take(loop, 1)
    loop.restart_script(at=2)
    line = "elastic: step 2: the script begins again on this worker, so variables that are not part"
    assert capsys.readouterr().out.startswith(line)


def test_the_nearest_objects_of_a_script_are_reached_and_no_more_than_the_most() -> None:
    near = [[object() for _ in range(MOST_PARTS + 1)] for _ in range(2 * MOST_PARTS)]
    objects = [*reached(near, 2, lambda _: False)]
    assert objects[: len(near)] == near and len(objects) == MOST_REACHED
    alone = [*reached(near[:1], 2, lambda _: False)]
    assert alone == [near[0], *near[0][:MOST_PARTS]]
