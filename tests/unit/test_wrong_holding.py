"""A worker refuses to serve a state of another step than the plan's: labels are checked where the
bytes are."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.errors import WrongHolding
from actors.interruption import Interruption
from actors.trainer import Holding, Trainer, WorkerOptions
from actors.worker import kind_of
from elastic.assignment import Assignment
from elastic.commands import Form
from elastic.layout import Layout
from elastic.transfers import Relayout
from pipelines.program import TrainingProgram
from pipelines.recipes import tiny

OLD = Assignment(1, Layout(), ("w0",))
NEW = Assignment(2, Layout(), ("w0",))


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A worker that stands at step 110 with its part under generation 1."""
    settings = tiny().model_dump(mode="json") | {"data": {"source": "random", "seq_len": 16}}
    program = TrainingProgram(settings=settings, data_folder=None, device="cpu")
    options = WorkerOptions(str(tmp_path))
    made = Trainer("w0", "n0", program, options, lambda event: None, Interruption())
    made.holdings = {1: Holding(OLD, {})}
    made.held_step = 110
    return made


@pytest.mark.parametrize(
    ("step", "old"),
    [(10, OLD), (111, OLD), (110, Assignment(3, Layout(), ("w0",)))],
    ids=["an older step", "a newer step", "another assignment"],
)
def test_a_worker_refuses_a_plan_that_relabels_its_state(
    trainer: Trainer, step: int, old: Assignment
) -> None:
    plan = Relayout(0, step, old, NEW, ("w0",))
    with pytest.raises(WrongHolding, match=f"step {step} under generation .* at step 110") as told:
        trainer.form(Form(2, NEW, plan, "127.0.0.1", 1))
    assert kind_of(told.value) == "holding"
    assert trainer.formation is None, "it refuses before it meets anybody"
