"""Where the time of a run's steps went and how fast its devices were, newly and in all."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from elastic.protocol.votes import SPLIT

RECENT_S = 60.0
MAX_RECENT = 1000
"""The newest steps: about `RECENT_S` of them, at most `MAX_RECENT`."""


@dataclass(slots=True)
class StepTimes:
    """Sums over some steps: their seconds by part, on the worker that reported them."""

    num_steps: int = 0
    num_tokens: int = 0
    worker_s: float = 0.0
    """All seconds, times the workers that trained meanwhile."""
    compute_s: float = 0.0
    communication_s: float = 0.0
    data_s: float = 0.0
    vote_s: float = 0.0
    snapshot_s: float = 0.0
    other_s: float = 0.0

    def add(self, step: StepTimes) -> None:
        for name in FIELDS:
            setattr(self, name, getattr(self, name) + getattr(step, name))

    @property
    def seconds(self) -> float:
        """The sum of the parts."""
        total_s: float = sum(getattr(self, name) for name in SPLIT)
        return total_s

    def shares(self) -> dict[str, float]:
        """Each part's share of the time, by its name without `_s`; empty without steps."""
        total_s = self.seconds
        if not total_s:
            return {}
        return {name.removesuffix("_s"): getattr(self, name) / total_s for name in SPLIT}


FIELDS = tuple(part.name for part in fields(StepTimes))


@dataclass(frozen=True, slots=True)
class Device:
    """What the newest ready worker reported of its device and of a step's operations."""

    name: str = ""
    step_flops: float | None = None
    peak_flops: float | None = None

    def speed(self, times: StepTimes) -> dict[str, float | None]:
        """The speed of one device during these steps.

        `tokens_per_s` (or samples), `flops_per_token`, `tflops` (10^12 operations per second), and
        `mfu`, the model FLOPs utilization: the share of the device's peak (Chowdhery et al., PaLM,
        2022). A number that is not known is None.
        """
        flops, peak = self.step_flops, self.peak_flops
        if not times.worker_s:
            return dict.fromkeys(("tokens_per_s", "flops_per_token", "tflops", "mfu"))
        rate = None if flops is None else flops * times.num_steps / times.worker_s
        num_tokens = times.num_tokens or None
        per_token = flops * times.num_steps / num_tokens if flops and num_tokens else None
        return {
            "tokens_per_s": times.num_tokens / times.worker_s,
            "flops_per_token": per_token,
            "tflops": None if rate is None else rate / 1e12,
            "mfu": None if rate is None or not peak else rate / peak,
        }


@dataclass(slots=True)
class StepTimeAccount:
    """The time of committed steps, redone ones included, from the journal and the metrics."""

    run: StepTimes = field(default_factory=StepTimes)
    is_whole: bool = True
    """Whether `run` has all steps: a reader without the cache begins near the end."""
    device: Device = field(default_factory=Device)
    _recent: deque[tuple[float, tuple[float, ...]]] = field(default_factory=deque)
    """When each of the newest steps was committed, and its `StepTimes` in the order of `FIELDS`: a
    display sums them several times a second."""

    def take_ready(self, line: Mapping[str, Any]) -> None:
        """Add one journal line; only `WorkerReady` matters."""
        if line.get("event") == "WorkerReady" and "step_flops" in line:
            self.device = Device(line["device_name"], line["step_flops"], line["peak_flops"])

    def take(self, row: Mapping[str, Any]) -> None:
        """Add one line of the metrics; lines without a split are of no use here."""
        step = times_of(row)
        if step is None:
            return
        self.run.add(step)
        self._recent.append((row["time"], tuple(getattr(step, name) for name in FIELDS)))
        while len(self._recent) > 2 and (
            self._recent[0][0] < row["time"] - RECENT_S or len(self._recent) > MAX_RECENT
        ):
            self._recent.popleft()

    @property
    def recent(self) -> StepTimes:
        """The newest steps."""
        columns = zip(*(values for _, values in self._recent), strict=True)
        return StepTimes(**dict(zip(FIELDS, map(sum, columns), strict=False)))


def times_of(row: Mapping[str, Any]) -> StepTimes | None:
    """The time of one line of the metrics, or None if it has no split."""
    split: dict[str, Any] = {name: row.get(name) for name in SPLIT}
    if None in split.values():
        return None
    return StepTimes(1, row["tokens"] or 0, sum(split.values()) * row["world_size"], **split)
