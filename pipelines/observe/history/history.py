"""The history of a run from its files: membership, progress, time, and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pipelines.observe.history.dealing import DealtMicrobatches
from pipelines.observe.history.formatting import counted, duration
from pipelines.observe.history.goodput import Account
from pipelines.observe.history.membership import Membership
from pipelines.observe.history.progress import RunProgress
from pipelines.observe.history.run_folder import RunFolder, Tail
from pipelines.observe.history.step_time import StepTimeAccount


@dataclass(slots=True)
class History:
    """A run's membership, progress and accounts of its time, from its files."""

    membership: Membership = field(default_factory=Membership)
    progress: RunProgress = field(default_factory=RunProgress)
    account: Account = field(default_factory=Account)
    step_time: StepTimeAccount = field(default_factory=StepTimeAccount)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """The peak memory of each worker on the device that it trains on: its GPU, or the host."""
    dealt: DealtMicrobatches = field(default_factory=DealtMicrobatches)
    num_damaged: int = 0

    def take(
        self,
        journal: Iterable[dict[str, Any]],
        metrics: Iterable[dict[str, Any]],
        system: Iterable[dict[str, Any]] = (),
    ) -> None:
        """Add lines; malformed lines are skipped and counted in `num_damaged`."""
        in_journal = (self.membership, self.account, self.dealt)
        takers = [*(part.take for part in in_journal), self.step_time.take_ready]
        for line in journal:
            self._take(line, *takers)
        for row in metrics:
            self._take(row, self.progress.take, self.step_time.take)
        for sample in system:
            self._take(sample, self._take_sample)

    def _take_sample(self, sample: dict[str, Any]) -> None:
        peak_bytes = sample["device_peak_bytes"] or sample["host_peak_bytes"]
        self.peak_bytes[sample["worker"]] = peak_bytes

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
        if progress.reported:
            parts.append(progress.reported_text)
        parts.append(duration(membership.wall_s(now)))
        goodput = self.goodput(now)
        if goodput is not None:
            parts.append(f"goodput {goodput:.1%} with start-up")
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
    history.take(*(Tail(log).drain() for log in folder.history_logs))
    return history
