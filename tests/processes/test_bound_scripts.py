"""What a script changes between its steps has the effect that it has in a plain loop: its model's
modes, attributes and hooks, its dataset, and what its functions use."""

from __future__ import annotations

from pathlib import Path

import bound_scripts
import pytest
from test_script_habits import run_habit

pytestmark = pytest.mark.slow

IN_EACH_RUN = ("evaluates_averages", "trains_in_the_block")


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_EACH_RUN else pytest.param(name, marks=pytest.mark.soak)
        for name in bound_scripts.PLAIN
    ],
)
def test_losses_are_those_of_the_plain_loop_through_deaths(name: str, tmp_path: Path) -> None:
    layout = "dp=3" if name in ("augments", "freezes_later") else "dp=2,fsdp=2"
    run = run_habit(tmp_path, name, layout=layout, module=bound_scripts)
    assert list(run.losses().values()) == pytest.approx(list(bound_scripts.PLAIN[name]()), rel=1e-9)


def test_dataset_of_another_length_is_refused(tmp_path: Path) -> None:
    run = run_habit(tmp_path, "grows", 0, "user_error", layout="dp=2", module=bound_scripts)
    assert "the loader's dataset has 200 samples in place of 100" in run.stopped.reason
