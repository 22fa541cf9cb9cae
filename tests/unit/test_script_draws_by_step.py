"""The random generators are seeded at each moment of a step outside of its microbatches."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from test_loop import MODULE, ListEngine, Microbatch, declare

from pipelines.loop import Run
from pipelines.loop.loop import Loop
from pipelines.loop.step import Position

POINTS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


class Worker:
    """A loop that notes its draws by step and moment; other code draws in between."""

    def __init__(self, seed: int, disturbance: int) -> None:
        self.disturbance = disturbance
        self.drawn: dict[int, list[Any]] = {}
        self.loop = Loop(self.script, seed)

    def script(self, run: Run) -> None:
        declare(run)
        for step in run.steps(9):
            drawn = [draw()]
            with step:
                drawn.append(draw())
                for points in step.batches():
                    draw()
                    step.backward(points.sum() * torch.ones((), requires_grad=True))
                drawn.append(draw())
            self.drawn[step.number] = [*drawn, draw()]

    def take(self, number: int, commits: bool = True) -> None:
        self.disturb()
        self.loop.begin(number, Position(), lambda: self.loop.state.kept())
        self.loop.await_arrival()
        self.disturb()
        engine = ListEngine(*[Microbatch(POINTS, 2)] * self.disturbance)
        self.loop.compute(engine, MODULE)
        if commits:
            self.loop.commit(number, Position(), is_last=False, loss=0.0)
            self.loop.await_arrival()

    def disturb(self) -> None:
        for _ in range(self.disturbance):
            draw()


def test_workers_draw_the_same_and_a_repeated_step_does_too() -> None:
    first, second, other = Worker(5, 1), Worker(5, 3), Worker(6, 1)
    for worker in (first, second, other):
        for number in (1, 2):
            worker.take(number)
    second.take(3, commits=False)
    for worker in (first, second):
        worker.take(3)
        worker.take(4)
    joined = Worker(5, 2)
    joined.take(3)
    joined.take(4)
    assert first.drawn == second.drawn and first.drawn[3] == joined.drawn[3]
    assert other.drawn[2] != first.drawn[2]
    numbers = [number for moments in first.drawn.values() for draws in moments for number in draws]
    assert len(set(numbers)) == len(numbers) == 4 * 4 * 3
