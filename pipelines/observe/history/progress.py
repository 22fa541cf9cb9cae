"""The progress of a run: steps, loss curve and speed from its metrics, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RECENT_S = 20.0
MAX_RECENT = 1000
"""Throughput is computed over the newest rows: about `RECENT_S` and at most `MAX_RECENT` rows."""
MODELS_OF_SAMPLES = ("mlp", "custom")
"""Kinds of models whose batches are counted in samples; all others count tokens."""


def unit_of(recipe: Mapping[str, Any] | None) -> str:
    """What a run counts, from its `recipe.json`: `tokens` or `samples`."""
    model = ((recipe or {}).get("settings") or {}).get("model") or {}
    return "samples" if model.get("kind") in MODELS_OF_SAMPLES else "tokens"


@dataclass(slots=True)
class Point:
    """Some consecutive steps: their end, and their mean, lowest and highest loss.

    `void`: a rollback has undone them.
    """

    time: float
    step: int
    mean: float
    low: float
    high: float
    num_steps: int = 1
    void: bool = False

    def merged(self, later: Point) -> Point:
        num_steps = self.num_steps + later.num_steps
        mean = (self.mean * self.num_steps + later.mean * later.num_steps) / num_steps
        low, high = min(self.low, later.low), max(self.high, later.high)
        return Point(later.time, later.step, mean, low, high, num_steps, self.void)


@dataclass(slots=True)
class Curve:
    """A loss curve of at most `limit` points; adjacent points are merged as it grows."""

    limit: int = 1024
    points: list[Point] = field(default_factory=list)
    _steps_per_point: int = 1

    def add(self, time: float, step: int, loss: float) -> None:
        point = Point(time, step, loss, loss, loss)
        last = self.points[-1] if self.points else None
        if last is None or last.void or last.num_steps >= self._steps_per_point:
            self.points.append(point)
        else:
            self.points[-1] = last.merged(point)
        if len(self.points) > self.limit:
            self._thin()

    def roll_back(self, step: int) -> None:
        """Mark the points from this step on as void."""
        for point in reversed(self.points):
            if point.step < step:
                break
            point.void = True

    def _thin(self) -> None:
        thinned: list[Point] = []
        for point in self.points:
            has_space = thinned and thinned[-1].num_steps <= self._steps_per_point
            if has_space and thinned[-1].void == point.void:
                thinned[-1] = thinned[-1].merged(point)
            else:
                thinned.append(point)
        self.points = thinned
        self._steps_per_point *= 2


@dataclass(slots=True)
class RunProgress:
    """A run's steps; `loss` is the newest finite loss, `step` the newest committed step."""

    step: int = 0
    time: float = 0.0
    """When the newest step committed."""
    furthest_step: int = 0
    loss: float | None = None
    lr: float | None = None
    reported: dict[str, float] = field(default_factory=dict)
    """The newest finite number that a script has reported, by name."""
    num_rows: int = 0
    num_redone: int = 0
    num_skipped: int = 0
    num_tokens: int = 0
    unit: str = "tokens"
    """What `num_tokens` and `tokens_per_s` count: tokens or samples; see `unit_of`."""
    curve: Curve = field(default_factory=Curve)
    _recent: deque[tuple[float, int, int]] = field(default_factory=deque)

    def take(self, row: dict[str, Any]) -> None:
        """Add one row; a redone step replaces the earlier ones."""
        self.num_rows += 1
        if row["step"] <= self.step:
            self.curve.roll_back(row["step"])
        if row["step"] <= self.furthest_step:
            self.num_redone += 1
        else:
            self.num_tokens += row["tokens"] or 0
        self.step, self.time = row["step"], row["time"]
        self.furthest_step = max(self.furthest_step, self.step)
        self.num_skipped += bool(row.get("skipped"))
        if row["lr"] is not None:
            self.lr = row["lr"]
        if row["loss"] is not None:
            self.loss = row["loss"]
            self.curve.add(row["time"], row["step"], row["loss"])
        numbers = row.get("reported") or {}
        self.reported |= {name: value for name, value in numbers.items() if value is not None}
        self._remember(row)

    @property
    def reported_text(self) -> str:
        """`accuracy 0.9123, perplexity 31.2`: the newest numbers that a script has reported."""
        return ", ".join(f"{name} {value:.4g}" for name, value in self.reported.items())

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput on the wall clock over the newest rows, recoveries included."""
        return self._per_second(2)

    @property
    def steps_per_s(self) -> float | None:
        return self._per_second(1)

    def _remember(self, row: dict[str, Any]) -> None:
        self._recent.append((row["time"], 1, row["tokens"] or 0))
        while len(self._recent) > 2 and (
            self._recent[0][0] < row["time"] - RECENT_S or len(self._recent) > MAX_RECENT
        ):
            self._recent.popleft()

    def _per_second(self, place: int) -> float | None:
        """The rate of an entry of the recent rows; the first row only begins the time span."""
        span_s = self._recent[-1][0] - self._recent[0][0] if self._recent else 0.0
        if span_s <= 0:
            return None
        return sum(entry[place] for entry in list(self._recent)[1:]) / span_s
