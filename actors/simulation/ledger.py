"""Ledger of a simulated run: committed steps, redone steps and pauses."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

ROUNDING_S = 1e-6
"""Gaps between steps below this are rounding errors."""


@dataclass(slots=True)
class Ledger:
    """What a run has achieved; times are in seconds since its start."""

    pauses_s: list[float] = field(default_factory=list)
    """From the last committed step, or from the begin of an aborted one, to the next step."""
    num_redone: int = 0
    started_s: float | None = None
    """When the first step began."""
    _committed_s: array[float] = field(default_factory=lambda: array("d"))
    """The time spent in the first steps, by number."""
    _worker_s: array[float] = field(default_factory=lambda: array("d"))
    _last_s: float = 0.0

    @property
    def step(self) -> int:
        """The newest committed step."""
        return len(self._committed_s)

    @property
    def committed_s(self) -> float:
        """The time spent in steps that are still committed."""
        return self._committed_s[-1] if self._committed_s else 0.0

    @property
    def worker_s(self) -> float:
        """The same in worker-seconds."""
        return self._worker_s[-1] if self._worker_s else 0.0

    def commit(self, step: int, now: float, step_s: float, world_size: int) -> None:
        """Count a step; those from it on that were counted before are redone."""
        if self.step >= step:
            self.num_redone += self.step + 1 - step
            del self._committed_s[step - 1 :], self._worker_s[step - 1 :]
        if self.started_s is None:
            self.started_s = now - step_s
        elif now - step_s - self._last_s > ROUNDING_S:
            self.pauses_s.append(now - step_s - self._last_s)
        self._committed_s.append(self.committed_s + step_s)
        self._worker_s.append(self.worker_s + step_s * world_size)
        self._last_s = now
