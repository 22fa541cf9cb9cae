"""Parameters and buffers without dims train as in one process under every layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import scalar_net
import torch
from harness import Outcome, run_in_processes
from loops import FOLDER

from actors.runtime.fault_spec import Fault
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested
from pipelines.loop.script import script_of
from pipelines.training.checkpoint.weights import load_weights

RECIPE = f"{Path(scalar_net.__file__)}:recipe"


@cache
def plain_results(seed: int = scalar_net.SETTINGS.seed):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return scalar_net.train_in_one_process(seed)
    finally:
        torch.set_num_threads(num_threads)


def assert_trained_as_plain(run: Outcome, seed: int = scalar_net.SETTINGS.seed) -> None:
    assert run.stopped.outcome == "completed", run.stopped
    losses, state = plain_results(seed)
    assert list(run.losses().values()) == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(load_weights(run.folder), dict(state), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("layout", "resharded", "changes"),
    [
        ("fsdp=4,zero=3", "pp=2,fsdp=2,zero=1", {}),
        pytest.param("dp=2,fsdp=2,zero=1", "tp=2,fsdp=2,zero=3", {}, marks=pytest.mark.soak),
        pytest.param("fsdp=4,zero=2", "dp=4", {}, marks=pytest.mark.soak),
        pytest.param("pp=2,fsdp=2,zero=3", "dp=2,tp=2", {}, marks=pytest.mark.soak),
        pytest.param("fsdp=4,zero=3", "fsdp=4,zero=1", {"offload": True}, marks=pytest.mark.soak),
    ],
)
def test_parameters_without_dims_killed_twice_and_resharded_equal_the_plain_loop(
    layout: str, resharded: str, changes: dict[str, object], tmp_path: Path
) -> None:
    run = run_in_processes(
        tmp_path,
        scalar_net.CUSTOM_SETTINGS.model_copy(update=changes),
        4,
        layout=layout,
        faults=(Fault("kill", "w2", 6, "compute"), Fault("kill", "w1", 12, "apply")),
        due=((18, LayoutRequested("other axes", TargetLayout.parse(resharded))),),
        recipe=RECIPE,
    )
    assert_trained_as_plain(run)
    assert len(run.lines_of("WorkerLost")) == 2
    last, wanted = Layout.parse(run.lines_of("Resume")[-1]["layout"]), Layout.parse(resharded)
    assert (last.pp, last.tp) == (wanted.pp, wanted.tp), "replacements may still start"


@pytest.mark.soak
def test_loop_with_parameters_without_dims_equals_the_plain_loop(tmp_path: Path) -> None:
    (marks := tmp_path / "marks").mkdir()
    run = run_in_processes(
        tmp_path,
        script_of(scalar_net.train).settings,
        4,
        layout="fsdp=4,zero=3",
        due=((19, LayoutRequested("fewer shards", TargetLayout.parse("fsdp=2,zero=1"))),),
        recipe=f"{scalar_net.__file__}:train",
        environment={FOLDER: str(marks)},
    )
    assert len(run.lines_of("WorkerLost")) == 2
    assert_trained_as_plain(run, seed=0)
    saved = torch.load(marks / "saved.pt")
    state = plain_results(0)[1]
    torch.testing.assert_close(saved["state"], dict(state), rtol=1e-9, atol=1e-11)
    assert saved["gates"][-1] == pytest.approx(state["layers.0.gate"].item(), rel=1e-9)


@pytest.mark.soak
def test_scalars_in_bfloat16_train_alike_at_all_zero_stages(tmp_path: Path) -> None:
    """FSDP does not see them at stage 3, so this repository copies them to bfloat16."""
    trained = {}
    for zero in (1, 2, 3):
        (folder := tmp_path / str(zero)).mkdir()
        settings = scalar_net.CUSTOM_SETTINGS.model_copy(update={"dtype": "bfloat16", "steps": 6})
        run = run_in_processes(folder, settings, 2, layout=f"fsdp=2,zero={zero}", recipe=RECIPE)
        assert run.stopped.outcome == "completed", run.stopped
        trained[zero] = load_weights(run.folder)
    for zero in (2, 3):
        torch.testing.assert_close(trained[zero], trained[1], rtol=1e-3, atol=1e-4)
    assert trained[3]["head.logit_scale"].shape == ()
