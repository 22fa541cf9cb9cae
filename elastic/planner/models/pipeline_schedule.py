"""Pipeline schedules, simulated event by event: when each rank computes which microbatch.

The order of a rank's actions is that of torch's schedules (`torch.distributed.pipelining`): GPipe,
1F1B, and interleaved 1F1B (Narayanan et al., 2021). Zero bubble counts as interleaved. An action
begins when the rank has finished the one before and its input has arrived. If more workers of a
node are active than it has cores, all of them are slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

NUM_WAVES = 2
"""So many times `pp` microbatches are simulated; further ones take as long as the last did."""
SEVERAL_STAGES = ("interleaved_1f1b", "zero_bubble")


class Action(NamedTuple):
    """A forward or a backward of one microbatch through one stage."""

    is_forward: bool
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a pipeline: seconds of forward and backward of a microbatch in each.

    A hidden state arrives `message_s` after it has been sent. Each stage is computed by
    `crowd` workers on one node at the same time, on `cores` (0: each has its own device).
    """

    schedule: str
    pp: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    message_s: float = 0.0
    crowd: float = 1.0
    cores: int = 0


def pipeline_seconds(pipeline: Pipeline, num_rounds: int) -> float:
    """The seconds of all microbatches of a step, `num_rounds` a rank."""
    period = pipeline.pp if pipeline.schedule in SEVERAL_STAGES else 1
    extra = max(0, num_rounds - NUM_WAVES * pipeline.pp) // period
    if pipeline.schedule == "gpipe" or not extra:
        return _simulate(pipeline, num_rounds)
    least = num_rounds - extra * period
    whole_s = _simulate(pipeline, least)
    return whole_s + extra * (whole_s - _simulate(pipeline, least - period))


def actions_of(schedule: str, pp: int, vp: int, pp_rank: int, num_rounds: int) -> list[Action]:
    """What a rank computes in a step, in order."""
    if schedule in SEVERAL_STAGES:
        return _interleaved(pp, vp, pp_rank, num_rounds)
    forwards = [Action(True, pp_rank, number) for number in range(num_rounds)]
    backwards = [Action(False, pp_rank, number) for number in range(num_rounds)]
    warm_up = num_rounds if schedule == "gpipe" else min(num_rounds, pp - pp_rank)
    return _merged(forwards, backwards, warm_up)


def _interleaved(pp: int, vp: int, pp_rank: int, num_rounds: int) -> list[Action]:
    """Groups of `pp` microbatches go through a rank's stages in turn; backwards in reverse."""
    forwards, backwards = [], []
    for begin in range(0, num_rounds, pp):
        group = range(begin, min(begin + pp, num_rounds))
        for chunk in range(vp):
            forwards += [Action(True, chunk * pp + pp_rank, number) for number in group]
            last = (vp - 1 - chunk) * pp + pp_rank
            backwards += [Action(False, last, number) for number in group]
    warm_up = min(len(forwards), (vp - 1) * pp + 2 * (pp - 1 - pp_rank) + 1)
    return _merged(forwards, backwards, warm_up)


def _merged(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Forwards alone, then a backward and a forward in turn, then backwards alone."""
    actions = forwards[:warm_up]
    for number, backward in enumerate(backwards):
        actions.append(backward)
        actions += forwards[warm_up + number : warm_up + number + 1]
    return actions


@lru_cache(maxsize=4096)
def _simulate(pipeline: Pipeline, num_rounds: int) -> float:
    vp = len(pipeline.forward_s) // pipeline.pp
    orders = [
        actions_of(pipeline.schedule, pipeline.pp, vp, rank, num_rounds)
        for rank in range(pipeline.pp)
    ]
    simulation = _Simulation(pipeline, orders)
    return simulation.run_shared() if pipeline.cores else simulation.run()


class _Simulation:
    """The ranks of a pipeline and a clock."""

    def __init__(self, pipeline: Pipeline, orders: Sequence[Sequence[Action]]) -> None:
        self.pipeline = pipeline
        self.orders = orders
        self.last_stage = len(pipeline.forward_s) - 1
        self.arrived: dict[Action, float] = {}
        """When the input of an action has arrived at its rank."""
        self.position = [0] * len(orders)
        self.left: list[float | None] = [None] * len(orders)
        """The seconds of work left of each rank's action; None: it waits for its input."""

    def run(self) -> float:
        """Every rank has a device of its own: its actions do not slow down others."""
        free = [0.0] * len(self.orders)
        is_waiting = False
        while not is_waiting:
            is_waiting = True
            for rank, order in enumerate(self.orders):
                while self.position[rank] < len(order):
                    action = order[self.position[rank]]
                    ready = self._ready(action)
                    if ready == inf:
                        break
                    free[rank] = max(free[rank], ready) + self._work(action)
                    self._finish(rank, free[rank])
                    is_waiting = False
        return max(free)

    def run_shared(self) -> float:
        """Ranks share the cores of their node."""
        now, num_left = 0.0, sum(map(len, self.orders))
        while num_left:
            next_input = self._start(now)
            active = [rank for rank, left in enumerate(self.left) if left is not None]
            speed = self._speed(len(active))
            until = min((self.left[rank] or 0.0 for rank in active), default=inf) / speed
            elapsed = min(until, next_input - now)
            assert elapsed < inf, "every action's input comes from an earlier one"
            now += elapsed
            for rank in active:
                left = (self.left[rank] or 0.0) - elapsed * speed
                self.left[rank] = left
                if left <= 1e-12:
                    self._finish(rank, now)
                    num_left -= 1
        return now

    def _start(self, now: float) -> float:
        """Start what can start; returns when the next input arrives."""
        next_input = inf
        for rank, order in enumerate(self.orders):
            if self.left[rank] is None and self.position[rank] < len(order):
                action = order[self.position[rank]]
                ready = self._ready(action)
                if ready <= now:
                    self.left[rank] = self._work(action)
                else:
                    next_input = min(next_input, ready)
        return next_input

    def _ready(self, action: Action) -> float:
        if action.is_forward and action.stage == 0:
            return 0.0
        return self.arrived.get(action, inf)

    def _work(self, action: Action) -> float:
        pipeline = self.pipeline
        return (pipeline.forward_s if action.is_forward else pipeline.backward_s)[action.stage]

    def _finish(self, rank: int, now: float) -> None:
        action = self.orders[rank][self.position[rank]]
        self.position[rank] += 1
        self.left[rank] = None
        stage = action.stage + (1 if action.is_forward else -1)
        if action.is_forward and action.stage == self.last_stage:
            self.arrived[action._replace(is_forward=False)] = now
        elif stage >= 0:
            message_s = self.pipeline.message_s if self.pipeline.pp > 1 else 0.0
            self.arrived[action._replace(stage=stage)] = now + message_s

    def _speed(self, num_active: int) -> float:
        num_workers = num_active * self.pipeline.crowd
        return min(1.0, self.pipeline.cores / num_workers) if num_active else 1.0
