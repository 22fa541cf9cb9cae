"""A run with slow steps, of tenths of a second: nodes join and leave within a few hundred steps,
so that rounding errors stay small."""

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


def slow_run_arguments(layout: str, workers: str, *settings: str) -> list[str]:
    """The arguments of `elastic train` for such a run."""
    arguments = ["tiny", "--workers", workers, "--layout", layout, "--steps", NO_END]
    return arguments + [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]


def assert_one_lineage(command: Command, max_repeated: int = 0) -> None:
    """Each step is committed once, except for steps that a rollback undid, with the loss of
    the undisturbed run."""
    [stopped] = command.lines("Stopped")
    metrics = command.metrics()
    loss_of_step = {line["step"]: line["loss"] for line in metrics}
    assert list(loss_of_step) == list(range(1, stopped["step"] + 1)), "steps are lost"
    num_repeated = sum(line["from_step"] - line["step"] for line in command.lines("RolledBack"))
    assert len(metrics) - len(loss_of_step) == num_repeated <= max_repeated, "steps are repeated"
    generations = [line["generation"] for line in metrics]
    assert generations == sorted(generations)
    losses_and_norms, _ = expected(override(load("tiny"), SETTINGS), len(loss_of_step))
    assert list(loss_of_step.values()) == pytest.approx(
        [loss for loss, _ in losses_and_norms], rel=1e-6
    )
