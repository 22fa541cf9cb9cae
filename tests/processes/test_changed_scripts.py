"""What a script changes in its model between two steps has the effect that it has in a plain loop;
what it changes elsewhere is refused."""

from __future__ import annotations

from pathlib import Path

import changed_scripts
import loops
import pytest
import torch
from test_script_habits import run_habit

from pipelines.errors import UserError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["dp=4", *(f"dp=2,fsdp=2,zero={n}" for n in (1, 2, 3))])
def test_changes_behind_a_step_are_those_of_a_plain_loop_through_deaths(
    layout: str, tmp_path: Path
) -> None:
    run = run_habit(tmp_path, "changes", 3, layout=layout, module=changed_scripts)
    losses, held_out, values = zip(*changed_scripts.plain_changes(), strict=True)
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    files = [*(tmp_path / "marks").glob("held-*.pt")]
    assert {int(file.name.split("-")[1]) for file in files} == set(range(4, 25, 4))
    for file in files:
        expected = held_out[int(file.name.split("-")[1]) - 1]
        assert float(torch.load(file)["loss"]) == pytest.approx(expected, rel=1e-6)
    [file] = (tmp_path / "marks").glob("final-*.pt")
    for name, value in torch.load(file).items():
        torch.testing.assert_close(value, values[-1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("changes_in_front", "step 3: the script has changed scale of its model in front of"),
        ("changes_in_body", "the body changes the buffer scale of the model outside of a forward"),
        ("changes_on_one_worker", "step 2: the scripts of the workers have different learning"),
        ("replaces_parameter", "model.layer.weight: another parameter in place of the model's"),
    ],
)
def test_changes_that_would_be_lost_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    run = run_habit(tmp_path, name, 0, "user_error", layout="dp=2", module=changed_scripts)
    assert reason in run.stopped.reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("changes_behind_passes", "the body changes the buffer layer.queue of the model outside"),
        ("changes_in_forward", "target.weight: the model changes these parameters itself within"),
    ],
)
def test_changes_in_a_step_are_refused_before_the_run(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        loops.limits_of_loop(getattr(changed_scripts, name))
