"""The experts that a custom recipe declares are dealt to ranks by `ep`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import custom_mixture
import pytest
from harness import run_in_processes
from loops import FOLDER, limits_of_loop

from actors.runtime.fault_spec import Fault
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested
from pipelines.errors import UserError
from pipelines.loop.script import script_of
from pipelines.training.custom.custom_workload import CustomWorkload


@pytest.mark.slow
def test_run_over_ep_with_a_reshard_and_a_kill_equals_the_plain_loop(tmp_path: Path) -> None:
    """Its loss has a part that is one of a microbatch, so passes are not merged."""
    run = run_in_processes(
        tmp_path,
        custom_mixture.CUSTOM_SETTINGS,
        3,
        layout="fsdp=2,ep=2",
        recipe=f"{custom_mixture.__file__}:recipe",
        due=((3, LayoutRequested("other", TargetLayout.parse("dp=2"))),),
        faults=(Fault("kill", "w1", 7, "compute"),),
    )
    assert run.stopped.outcome == "completed"
    layouts = [line["layout"] for line in run.lines_of("Resume")]
    assert layouts[:2] == ["fsdp=2,ep=2", "dp=2"], run.story()
    assert len(layouts) > 2
    expected = custom_mixture.train_in_one_process()
    losses = run.losses()
    assert [losses[n] for n in sorted(losses)] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_experts_of_a_loop_are_dealt_to_ranks_through_a_death_and_a_reshard(
    tmp_path: Path,
) -> None:
    (marks := tmp_path / "marks").mkdir()
    run = run_in_processes(
        tmp_path,
        script_of(custom_mixture.train).settings,
        3,
        layout="fsdp=2,ep=2",
        recipe=f"{custom_mixture.__file__}:train",
        due=((6, LayoutRequested("other", TargetLayout.parse("dp=2"))),),
        environment={FOLDER: str(marks)},
    )
    assert run.stopped.outcome == "completed", run.stopped
    layouts = [line["layout"] for line in run.lines_of("Resume")]
    assert layouts[:2] == ["fsdp=2,ep=2"] * 2 and layouts[-1] == "dp=2", run.story()
    assert len(run.lines_of("WorkerLost")) == 1
    expected = custom_mixture.train_in_one_process(seed=0)
    assert list(run.losses().values()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (custom_mixture.TwoLayerExperts, None),
        (custom_mixture.NormedExperts, "the outputs of layers.0 in parts"),
    ],
)
def test_experts_of_a_loop_are_tried_out_in_parts(kind: type, message: str | None) -> None:
    limits = limits_of_loop(partial(custom_mixture.train, kind=kind))
    reason = limits.refusal(Layout(fsdp=2, ep=2))
    assert reason is None if message is None else message in str(reason)


def refusal(**changes: object) -> str | None:
    workload = CustomWorkload(replace(custom_mixture.recipe(), **changes))
    return workload.limits().refusal(Layout(fsdp=2, ep=2))


def test_experts_that_depend_on_each_other_are_refused() -> None:
    assert refusal() is None
    normed = partial(custom_mixture.Mixture, custom_mixture.NormedExperts)
    assert "the outputs of layers.0 in parts" in str(refusal(model=normed))


def test_modules_that_are_no_experts_are_refused() -> None:
    assert "Recipe(experts=" in str(refusal(experts=()))
    assert "experts must be called with tokens" in str(refusal(experts=["head"]))
    with pytest.raises(UserError, match=r"experts: the module has no layers\.\*\.experts"):
        refusal(experts=["layers.*.experts"])
    with pytest.raises(UserError, match=r"layers is a list of 2 modules: stack their weights in"):
        refusal(experts=["layers"], model=partial(UnevenExperts))


class UnevenExperts(custom_mixture.Mixture):
    """A list of modules, not a stack of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = custom_mixture.nn.ModuleList([self.layers[0], custom_mixture.nn.Linear(3, 7)])
