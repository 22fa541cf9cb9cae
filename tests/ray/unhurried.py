"""A run with slow steps of tenths of a second: nodes come and go within a few hundred steps, so
that rounding errors stay small."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import Command

sys.path.append(str(Path(__file__).parents[1] / "processes"))

from expected import expected

from pipelines.run.recipes import load
from pipelines.settings.overrides import override

SETTINGS = (
    "data.source=random", "data.seq_len=64", "dtype=float64", "batch=24",
    "model.dim=96", "model.hidden_dim=192",
)  # fmt: skip
NO_END = "100000"
"""The number of steps of a run that the test stops."""


def unhurried(layout: str, workers: str, *settings: str) -> list[str]:
    """The arguments of `elastic train` for such a run."""
    given = ["tiny", "--workers", workers, "--layout", layout, "--steps", NO_END]
    return given + [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]


def assert_one_lineage(command: Command, most_redone: int = 0) -> None:
    """Each step is committed once, except for steps that a rollback has voided, with the loss of
    the undisturbed run."""
    [stopped] = command.lines("Stopped")
    metrics = command.metrics()
    last = {line["step"]: line["loss"] for line in metrics}
    assert list(last) == list(range(1, stopped["step"] + 1)), "lost"
    redone = sum(line["from_step"] - line["step"] for line in command.lines("RolledBack"))
    assert len(metrics) - len(last) == redone <= most_redone, "redone"
    generations = [line["generation"] for line in metrics]
    assert generations == sorted(generations)
    seen, _ = expected(override(load("tiny"), SETTINGS), len(last))
    assert list(last.values()) == pytest.approx([loss for loss, _ in seen], rel=1e-6)
