"""The history of a run: membership, progress and time accounting, with a one-line summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pipelines.observe.history.formatting import counted, duration
from pipelines.observe.history.goodput import Account
from pipelines.observe.history.membership import Membership
from pipelines.observe.history.progress import RunProgress
from pipelines.observe.history.run_folder import RunFolder, Tail


@dataclass(slots=True)
class History:
    """A run's membership, progress and time account, from its journal and metrics."""

    membership: Membership = field(default_factory=Membership)
    progress: RunProgress = field(default_factory=RunProgress)
    account: Account = field(default_factory=Account)
    num_damaged: int = 0

    def take(self, journal: Iterable[dict[str, Any]], metrics: Iterable[dict[str, Any]]) -> None:
        """Add lines; malformed lines are skipped and counted in `num_damaged`."""
        for line in journal:
            self._take(line, self.membership.take, self.account.take)
        for row in metrics:
            self._take(row, self.progress.take)

    def _take(self, line: dict[str, Any], *takers: Callable[[dict[str, Any]], object]) -> None:
        try:
            for take in takers:
                take(line)
        except (KeyError, TypeError, ValueError, AttributeError):
            self.num_damaged += 1

    def goodput(self, now: float | None = None) -> float | None:
        """The share of committed steps in the time with a driver."""
        return self.account.split(now).goodput

    def summary(self, now: float | None = None) -> str:
        """The run in one line."""
        membership, progress = self.membership, self.progress
        parts = [f"{progress.step:,} steps"]
        if progress.loss is not None:
            parts.append(f"loss {progress.loss:.4f}")
        parts.append(duration(membership.wall_s(now)))
        goodput = self.goodput(now)
        if goodput is not None:
            parts.append(f"goodput {goodput:.1%}")
        parts += [
            f"{membership.num_lost} lost",
            f"{membership.num_joined} joined",
            f"{counted(progress.num_redone, 'step')} redone",
        ]
        if progress.num_skipped:
            parts.append(f"{counted(progress.num_skipped, 'step')} skipped")
        if membership.num_not_finite:
            parts.append(f"{counted(membership.num_not_finite, 'evaluation')} not finite")
        return " · ".join(parts)


def read_history(folder: RunFolder) -> History:
    """The history of a run from its files, up to now."""
    history = History()
    history.take(Tail(folder.journal).drain(), Tail(folder.metrics).drain())
    return history
