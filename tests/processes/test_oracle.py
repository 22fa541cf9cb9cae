"""The comparison of losses detects mistakes: each mistake changes the losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Outcome, run_in_processes

from elastic.protocol.events import WorkerDraining
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings

SETTINGS = tiny().model_copy(
    update={
        "model": tiny().model.model_copy(update={"dropout": 0.1}),
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "steps": 24,
    }
)
RESIZED = ((8, WorkerDraining("w1", "shrinks")),)
TOLERANCE = 1e-9
MISTAKES = ("moments_zeroed", "sample_doubled", "gradients_scaled", "seeds_by_rank")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_in_processes(tmp_path_factory.mktemp("undisturbed"), SETTINGS, 1)


def test_resized_run_without_a_mistake_has_equal_losses(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """With dropout, whose seeds follow the microbatch."""
    run = run_in_processes(tmp_path, SETTINGS, 2, due=RESIZED)
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=TOLERANCE)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_the_program_changes_the_losses(
    mistake: str, tmp_path: Path, undisturbed: Outcome
) -> None:
    run = run_in_processes(
        tmp_path, SETTINGS, 2, due=RESIZED, program=f"mistaken_programs:{mistake}"
    )
    assert run.stopped.outcome == "completed"
    assert run.losses() != pytest.approx(undisturbed.losses(), rel=TOLERANCE)
    if mistake != "seeds_by_rank":
        assert run.losses()[1] == pytest.approx(undisturbed.losses()[1], rel=TOLERANCE)
