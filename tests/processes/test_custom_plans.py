"""Custom modules on tp=2, by plans of torch's parallel styles, and on cp=2, then on one worker,
equal a plain loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import custom_decoder
import custom_llama
import pytest
import torch
from custom_decoder import SETTINGS
from harness import run_in_processes
from loops import FOLDER, limits_of_loop

from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested, WorkerDraining
from pipelines.loop.script import script_of
from pipelines.training.custom.custom_workload import CustomWorkload


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "recomputation"), [("of_tutorial", "none"), ("of_titan", "full")])
def test_plan_of_torch_styles_trains_as_one_process_also_through_a_reshard(
    plan: str, recomputation: str, tmp_path: Path
) -> None:
    """With dropout of whole and of sharded activations, and of attention weights."""
    run = run_in_processes(
        tmp_path,
        custom_llama.CUSTOM_SETTINGS.model_copy(update={"activation_checkpointing": recomputation}),
        2,
        layout="tp=2",
        due=((8, WorkerDraining("w1", "shrinks")),),
        recipe=f"{custom_llama.__file__}:{plan}",
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert [line["layout"] for line in run.lines_of("Resume")] == ["tp=2", "dp=1"]
    torch.set_num_threads(1)
    assert list(run.losses().values()) == pytest.approx(
        custom_llama.train_in_one_process(), rel=1e-9
    )


@pytest.mark.slow
def test_cut_sequences_train_as_one_process_also_through_a_reshard(tmp_path: Path) -> None:
    """The two ranks have parts of different lengths, and the second one fewer counted tokens."""
    run = run_in_processes(
        tmp_path,
        custom_decoder.CUSTOM_SETTINGS,
        2,
        layout="cp=2",
        due=((6, WorkerDraining("w1", "shrinks")),),
        recipe=f"{custom_decoder.__file__}:recipe",
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert [line["layout"] for line in run.lines_of("Resume")] == ["cp=2", "dp=1"]
    torch.set_num_threads(1)
    assert list(run.losses().values()) == pytest.approx(
        custom_decoder.train_in_one_process(), rel=1e-9
    )


@pytest.mark.slow
def test_cut_sequences_of_a_loop_train_as_one_process_through_a_death_and_a_reshard(
    tmp_path: Path,
) -> None:
    (marks := tmp_path / "marks").mkdir()
    run = run_in_processes(
        tmp_path,
        script_of(custom_decoder.train).settings,
        3,
        layout="cp=2",
        due=((9, LayoutRequested("replicas", TargetLayout.parse("dp=2"))),),
        recipe=f"{custom_decoder.__file__}:train",
        environment={FOLDER: str(marks)},
    )
    assert run.stopped.outcome == "completed", run.stopped
    assert len(run.lines_of("WorkerLost")) == 1
    layouts = [line["layout"] for line in run.lines_of("Resume")]
    assert layouts[:2] == ["cp=2", "cp=2"] and layouts[-1] == "dp=2", run.story()
    torch.set_num_threads(1)
    assert list(run.losses().values()) == pytest.approx(
        custom_decoder.train_in_one_process(seed=0), rel=1e-9
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, None),
        ({"model": custom_decoder.CountingDecoder}, "take positions from the batch"),
        ({"has_weight": False}, "pass step.backward the mean over the tokens, and their number"),
        ({"model": custom_decoder.RecomputingDecoder}, "computed again in backward"),
        ({"model": custom_decoder.DroppingDecoder}, "draws random numbers"),
    ],
)
def test_a_loop_is_tried_out_with_cut_sequences(
    options: dict[str, Any], message: str | None
) -> None:
    limits = limits_of_loop(partial(custom_decoder.train, **options))
    reason = dict(limits.refused).get("cp")
    assert reason is None if message is None else message in (reason or "")
    assert "\n" not in (reason or "")


def cp_refusal(**changes: object) -> str | None:
    workload = CustomWorkload(replace(custom_decoder.recipe(), **changes))
    return dict(workload.limits().refused).get("cp")


def mean_loss(model, batch):
    return custom_decoder.loss(model, batch)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"sequence": {}}, "does not say which dims"),
        ({"model": custom_decoder.CountingDecoder}, "take positions from the batch"),
        ({"loss": mean_loss}, "must return pairs"),
        ({"sequence": {"token": 1}}, "no tensor 'token' with a dim 1"),
        ({"sequence": {"tokens": 1, "targets": 0}}, "must be equal"),
        (
            {"settings": SETTINGS.model_copy(update={"activation_checkpointing": "full"})},
            "activation_checkpointing=none",
        ),
    ],
)
def test_a_recipe_is_tried_out_with_cut_sequences(changes, message: str | None) -> None:
    reason = cp_refusal(**changes)
    assert reason is None if message is None else message in (reason or "")
    assert "\n" not in (reason or "")
