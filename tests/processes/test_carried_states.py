"""What microbatches carry from step to step is part of the run's state."""

from __future__ import annotations

from pathlib import Path

import carried_scripts
import loops
import pytest
from harness import run_in_processes
from test_script_habits import run_habit

from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested
from pipelines.loop.script import script_of

pytestmark = pytest.mark.slow

RESIZE = (18, LayoutRequested("one", TargetLayout.parse("dp=1")))


def test_hidden_states_are_those_of_a_plain_loop_through_deaths_and_a_resize(
    tmp_path: Path,
) -> None:
    run = run_habit(
        tmp_path, "carries", layout="dp=2,fsdp=2", module=carried_scripts, due=(RESIZE,)
    )
    assert len(run.lines_of("Resume")[-1]["workers"]) == 1
    assert list(run.losses().values()) == pytest.approx(
        [*carried_scripts.plain_carries()], rel=1e-9
    )


def test_run_resumed_with_other_workers_has_the_hidden_states(tmp_path: Path) -> None:
    recipe = f"{carried_scripts.__file__}:carries"
    settings = script_of(carried_scripts.carries).settings
    for steps, layout in ((11, "dp=1"), (loops.NUM_STEPS, "fsdp=3")):
        some = settings.model_copy(update={"steps": steps})
        num_workers = int(layout[-1])
        run = run_in_processes(tmp_path, some, num_workers, layout=layout, recipe=recipe)
        assert run.stopped.outcome == "completed", run.stopped
    assert list(run.losses().values()) == pytest.approx(
        [*carried_scripts.plain_carries()], rel=1e-9
    )
