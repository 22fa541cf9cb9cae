"""What one step's vote carries, and what is recorded of a committed step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vote:
    """The sums over all ranks that decide a step; every rank reads the same values.

    `sq_grad_norm` is of the summed, not yet normalised gradients. A step whose
    `num_nonfinite` is positive is committed as skipped: parameters untouched.
    """

    step: int
    loss_sum: float
    num_tokens: int
    sq_grad_norm: float
    num_contributions: int
    num_nonfinite: int = 0
    num_pause_wishes: int = 0
    num_snapshots: int = 0
    """So many ranks have the newest snapshot that was due whole at every keeper."""
    num_save_wishes: int = 0
    num_writing: int = 0
    """So many ranks still write their part of an earlier checkpoint."""

    def is_save_due(self, every: int) -> bool:
        """Whether the state after this step is to be saved: by `every` (steps, 0 for never), or
        because it is wished for."""
        return (bool(every) and self.step % every == 0) or self.num_save_wishes > 0

    def saves(self, every: int) -> bool:
        """Whether all ranks save it: it is due, and nobody is busy with another."""
        return self.is_save_due(every) and not self.num_writing


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step as it stands in `metrics.jsonl`; `time` is seconds since the epoch."""

    time: float
    step: int
    generation: int
    world_size: int
    loss: float | None
    tokens: int
    lr: float
    grad_norm: float | None
    step_s: float
    skipped: bool
