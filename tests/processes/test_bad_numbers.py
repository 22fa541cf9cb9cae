"""Non-finite steps are skipped, loss spikes cause a rollback, and audits find a flipped bit in one
replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bad_number_programs import BAD_STEP, SPIKE_BATCH
from expected import expected
from harness import Outcome, run_in_processes
from run_checks import (
    assert_each_sample_once,
    assert_no_step_repeated,
    assert_survivors_kept,
)

from actors.ray_backend.driver import exit_code
from actors.runtime.fault_spec import Fault
from actors.storage.checkpoint_files import find_checkpoints
from actors.storage.storage import open_storage
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested
from pipelines.observe.history.history import read_history
from pipelines.observe.history.run_folder import RunFolder
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import tiny, tiny_moe
from pipelines.settings import (
    CheckpointSettings,
    DataSettings,
    LossMonitorSettings,
    OptimizerSettings,
)

NUM_STEPS = 24
SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "optimizer": OptimizerSettings(lr=1e-3, warmup_steps=4, decay_steps=20),
        "dtype": "float64",
        "steps": NUM_STEPS,
        "eval_every": 0,
        "eval_samples": 4,
        "checkpoint": CheckpointSettings(every=0),
    }
)
FLIP = Fault("flip", "w1", 7)


def with_settings(**update: Any):
    return SETTINGS.model_copy(update=update)


def weights_at(run: Outcome, step: int) -> dict[str, torch.Tensor]:
    [path] = {line["path"] for line in run.lines_of("Checkpointed") if line["step"] == step}
    program = TrainingProgram(SETTINGS.model_dump(mode="json"), device="cpu")
    regions = {s.name: Region.whole(s.shape) for s in program.specs() if s.kind == "parameter"}
    return program.read_regions(open_storage(path), regions)


def assert_losses_and_weights(
    run: Outcome, losses: list[float], weights: dict[str, torch.Tensor]
) -> None:
    """Assert the losses and weights of the plain loop, which is not elastic."""
    assert run.stopped.outcome == "completed", run.stopped
    actual = run.losses()
    assert list(actual) == list(range(1, len(losses) + 1))
    assert [actual[step] for step in actual] == [
        None if loss is None else pytest.approx(loss, rel=1e-9) for loss in losses
    ]
    for name, weight in weights_at(run, run.stopped.step).items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-9, atol=1e-11)


BAD_NUMBERS = {
    "nan in the loss, replicas": ("dp=2", "bad_number_programs:nan_loss"),
    "nan in the loss, shards": ("fsdp=2", "bad_number_programs:nan_loss"),
    "nan in the loss, tensor parallel": ("tp=2", "bad_number_programs:nan_loss"),
    "infinite gradient, replicas": ("dp=2", "bad_number_programs:infinite_gradient"),
    "infinite gradient, shards of ZeRO 2": (
        "fsdp=2,zero=2",
        "bad_number_programs:infinite_gradient",
    ),
    "overflow in the sum over the ranks": ("dp=2", "bad_number_programs:overflowing_sum"),
    "as a fault, pipeline": ("pp=2", ""),
}


QUICK = (
    "nan in the loss, replicas",
    "infinite gradient, shards of ZeRO 2",
    "overflow in the sum over the ranks",
)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BAD_NUMBERS]
)
def test_step_with_non_finite_numbers_is_skipped(name: str, tmp_path: Path) -> None:
    layout, program = BAD_NUMBERS[name]
    source = {"program": program} if program else {"faults": (Fault("nan", "w1", BAD_STEP),)}
    run = run_in_processes(
        tmp_path, with_settings(eval_every=1, steps=12), 2, layout=layout, **source
    )
    losses_and_norms, weights = expected(SETTINGS, 12, skipped_steps=(BAD_STEP,))
    assert_losses_and_weights(run, [loss for loss, _ in losses_and_norms], weights)
    assert_no_step_repeated(run)
    [skipped] = [line for line in run.metrics if line["skipped"]]
    assert (skipped["step"], skipped["loss"], skipped["grad_norm"]) == (BAD_STEP, None, None)
    rates = [line["lr"] for line in run.metrics]
    assert rates[BAD_STEP - 1] != rates[BAD_STEP - 2], "the schedule continues"
    [warning] = run.lines_of("Warned")
    assert (warning["kind"], warning["step"]) == ("skipped", BAD_STEP)
    held_out = {line["step"]: line["loss"] for line in run.lines_of("Evaluated")}
    assert held_out[BAD_STEP] == held_out[BAD_STEP - 1] != held_out[BAD_STEP - 2]


@pytest.mark.slow
def test_non_finite_held_out_losses_are_null_and_the_run_completes_after_a_resume(
    tmp_path: Path,
) -> None:
    """Evaluations are NaN, infinite, or count nothing; metrics, journal and status report it."""
    settings = with_settings(
        eval_every=1, steps=6, checkpoint=CheckpointSettings(every=2, keep_last=1, keep_best=1)
    )
    for steps in (4, 6):
        settings = settings.model_copy(update={"steps": steps})
        run = run_in_processes(tmp_path, settings, 2, program="bad_number_programs:bad_evaluations")
        assert run.stopped.outcome == "completed", run.stopped
    held_out = {
        line["step"]: (line["loss"], line["not_finite"]) for line in run.lines_of("Evaluated")
    }
    assert held_out[2] == held_out[3] == (None, ["loss"])
    assert held_out[4] == (None, [])
    assert all(held_out[step][0] for step in (1, 5, 6))
    warnings = [(line["step"], line["kind"]) for line in run.lines_of("Warned")]
    assert warnings == [(2, "not finite"), (3, "not finite"), (4, "nothing counted")]
    history = read_history(RunFolder(run.run))
    assert history.membership.num_not_finite == 2
    texts = [event.text for event in history.membership.run_events if event.kind == "evaluated"]
    assert "held-out loss not finite at step 2" in texts
    assert "held-out loss nothing counted at step 4" in texts
    assert "2 evaluations not finite" in history.summary()


def test_non_finite_learning_rate_skips_its_step(tmp_path: Path) -> None:
    run = run_in_processes(
        tmp_path, with_settings(steps=12), 2, program="bad_number_programs:bad_rate"
    )
    assert run.stopped.outcome == "completed", run.stopped
    [skipped] = [line for line in run.metrics if line["skipped"]]
    assert (skipped["step"], skipped["lr"]) == (BAD_STEP, None)
    [warning] = run.lines_of("Warned")
    assert "learning rate" in warning["text"]


@pytest.mark.slow
def test_too_many_consecutive_skipped_steps_end_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    """The count continues across a kill and the following reshard."""
    kill = Fault("kill", "w2", BAD_STEP + 2)
    program = "bad_number_programs:always_nan"
    run = run_in_processes(
        tmp_path, SETTINGS, 3, layout="dp=3", faults=(kill,), program=program, max_skipped=5
    )
    assert exit_code(run.stopped, 0) == 1
    reason_start = f"steps {BAD_STEP} to {BAD_STEP + 4} were all skipped"
    assert run.stopped.reason.startswith(reason_start)
    assert len(run.lines_of("Resume")) >= 2
    assert run.stopped.step <= BAD_STEP + 7
    _, weights = expected(SETTINGS, BAD_STEP - 1)
    for name, weight in weights_at(run, run.stopped.step).items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_loss_spike_rolls_back_and_skips_its_batches(tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    settings = with_settings(record_samples=samples, checkpoint=CheckpointSettings(every=5))
    options = {
        "spike_factor": 3.0,
        "spike_window": 8,
        "program": "bad_number_programs:spiking_batch",
    }
    run = run_in_processes(tmp_path, settings, 2, layout="dp=2", **options)
    [rolled_back] = run.lines_of("RolledBack")
    spike_step = SPIKE_BATCH + 1
    assert f"the loss of step {spike_step} spiked" in rolled_back["cause"]
    rollback_step = rolled_back["step"]
    before = run.journal[: run.journal.index(rolled_back)]
    saved = [line["step"] for line in before if line.get("event") == "Checkpointed"]
    newest = max(step for step in saved if step < spike_step)  # 10, or another if a write is slow
    assert (rollback_step, rolled_back["source"]) == (newest, "checkpoint")
    skipped_batches = tuple(rolled_back["skipped_batches"])
    assert skipped_batches == tuple(range(rollback_step, spike_step)), "batches count from 0"
    assert_each_sample_once(run, SETTINGS.batch, skipped_batches)
    assert_survivors_kept(run, {"w0", "w1"})
    losses_and_norms, weights = expected(SETTINGS, NUM_STEPS, skipped_batches=skipped_batches)
    assert_losses_and_weights(run, [loss for loss, _ in losses_and_norms], weights)
    # The run resumes under another layout, and skips the same batches.
    longer_settings = settings.model_copy(update={"steps": NUM_STEPS + 8})
    resumed = run_in_processes(tmp_path, longer_settings, 2, layout="fsdp=2", **options)
    assert resumed.lines_of("Resume")[-1]["skipped_batches"] == list(skipped_batches)
    assert_each_sample_once(resumed, SETTINGS.batch, skipped_batches)
    losses_and_norms, weights = expected(
        longer_settings, NUM_STEPS + 8, skipped_batches=skipped_batches
    )
    assert_losses_and_weights(resumed, [loss for loss, _ in losses_and_norms], weights)


@pytest.mark.slow
def test_loss_spike_rolls_back_to_a_snapshot(tmp_path: Path) -> None:
    """The snapshot is of step 12: the run pauses before the next one is due."""
    options = {
        "spike_factor": 3.0,
        "spike_window": 16,
        "program": "bad_number_programs:spiking_batch",
    }
    run = run_in_processes(tmp_path, SETTINGS, 2, layout="fsdp=2", snapshot_every=6, **options)
    [rolled_back] = run.lines_of("RolledBack")
    assert (rolled_back["step"], rolled_back["source"]) == (SPIKE_BATCH, "snapshot")
    assert rolled_back["skipped_batches"] == [SPIKE_BATCH]
    losses_and_norms, weights = expected(SETTINGS, NUM_STEPS, skipped_batches=(SPIKE_BATCH,))
    assert_losses_and_weights(run, [loss for loss, _ in losses_and_norms], weights)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
def test_replicas_stay_equal_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    """Replicas are equal after every step, also across reshards, a kill and a joining worker."""
    due = ((10, LayoutRequested("shards", TargetLayout.parse("dp=2,fsdp=2"))),)
    due += ((35, LayoutRequested("replicas", TargetLayout.parse("dp=2,tp=2"))),)
    settings = with_settings(dtype=dtype, steps=45)
    kill = Fault("kill", "w3", 20)
    run = run_in_processes(
        tmp_path, settings, 4, layout="dp=4", due=due, faults=(kill,), audit_every=1
    )
    assert run.stopped.outcome == "completed"
    audits = run.lines_of("Audited")
    layouts = {line["generation"]: Layout.parse(line["layout"]) for line in run.lines_of("Resume")}
    num_replicated = sum(layouts[line["generation"]].dp > 1 for line in run.metrics)
    assert num_replicated > 20, "until the new worker joins there may be no replicas"
    assert len(audits) >= num_replicated - len(layouts)
    assert not any(line["splits"] for line in audits)
    assert not run.lines_of("Warned")


LAYOUTS = {
    "dp=2,cp=2": tiny,
    "dp=2,pp=2": tiny,
    "fsdp=2,zero=0": tiny,
    "dp=2,fsdp=2,zero=1": tiny,
    "dp=2,fsdp=2,zero=2": tiny,
    "dp=2,fsdp=2,ep=2": tiny_moe,
}


SOAK_LAYOUTS = ("dp=2,cp=2", "dp=2,pp=2", "dp=2,fsdp=2,zero=1")
"""`test_layouts.py` trains these axes in continuous integration."""


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.soak if layout in SOAK_LAYOUTS else pytest.mark.slow)
        for layout in LAYOUTS
    ],
)
def test_replicas_stay_equal_under_any_layout(layout: str, tmp_path: Path) -> None:
    changes = {"data": SETTINGS.data, "dtype": "float32", "steps": 15, "eval_every": 0}
    settings = LAYOUTS[layout]().model_copy(update=changes)
    num_workers = Layout.parse(layout).num_workers
    run = run_in_processes(tmp_path, settings, num_workers, layout=layout, audit_every=1)
    assert run.stopped.outcome == "completed"
    audits = run.lines_of("Audited")
    assert [line["step"] for line in audits] == list(range(1, 16))
    assert all(line["num_replicas"] >= 2 and not line["splits"] for line in audits)


def test_worker_with_a_flipped_bit_is_replaced(tmp_path: Path) -> None:
    """The effect of the flip on earlier gradients stays in the parameters of all replicas.

    With `min_workers` the run waits for the substitute, which is not always warm before its end.
    """
    run = run_in_processes(
        tmp_path,
        with_settings(steps=60),
        3,
        min_workers=3,
        layout="dp=3",
        faults=(FLIP,),
        audit_every=5,
    )
    assert run.stopped.outcome == "completed"
    audit, *_ = [line for line in run.lines_of("Audited") if line["splits"]]
    assert (audit["step"], audit["splits"]) == (10, [[["w0", "w2"], ["w1"]]])
    assert_no_step_repeated(run)
    assert {line["worker"] for line in run.lines_of("WorkerLost")} == {"w1"}
    assert_survivors_kept(run, {"w0", "w2"})
    members = [set(line["workers"]) for line in run.lines_of("Resume")]
    assert members == [{"w0", "w1", "w2"}, {"w0", "w2", "w3"}]
    assert [line["step"] for line in run.lines_of("Resume")][1] == 10, (
        "no worker trains while the audit is undecided"
    )
    losses_and_norms, _ = expected(SETTINGS, 11)
    losses = [loss for loss, _ in losses_and_norms]
    actual = list(run.losses().values())
    assert actual[:6] == pytest.approx(losses[:6], rel=1e-9)
    assert actual[6:10] != pytest.approx(losses[6:10], rel=1e-9), "the flip was seen in the loss"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=3", pytest.param("dp=4", marks=pytest.mark.soak)])
def test_audit_rollback_undoes_the_effect_of_a_flipped_bit(layout: str, tmp_path: Path) -> None:
    run = run_in_processes(
        tmp_path,
        with_settings(checkpoint=CheckpointSettings(every=4)),
        int(layout[-1]),
        layout=layout,
        faults=(FLIP,),
        audit_every=5,
        audit_rollback=True,
    )
    [rolled_back] = run.lines_of("RolledBack")
    assert (rolled_back["step"], rolled_back["source"]) == (4, "checkpoint")
    assert rolled_back["cause"].startswith("w1 corrupted the gradients")
    assert {line["worker"] for line in run.lines_of("WorkerLost")} == {"w1"}
    losses_and_norms, weights = expected(SETTINGS, NUM_STEPS)
    assert_losses_and_weights(run, [loss for loss, _ in losses_and_norms], weights)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2", pytest.param("dp=2,fsdp=2", marks=pytest.mark.soak)])
def test_two_unequal_replicas_roll_back_without_a_majority(layout: str, tmp_path: Path) -> None:
    """The run rolls back to before the last clean audit: step 8 may have the flipped bit."""
    num_workers = 2 if layout == "dp=2" else 4
    run = run_in_processes(
        tmp_path,
        with_settings(checkpoint=CheckpointSettings(every=4)),
        num_workers,
        layout=layout,
        faults=(FLIP,),
        audit_every=5,
    )
    [warning] = run.lines_of("Warned")
    assert "w1" in warning["text"] and "no majority" in warning["text"]
    [rolled_back] = run.lines_of("RolledBack")
    assert (rolled_back["step"], rolled_back["from_step"]) == (4, 10)
    assert not run.lines_of("WorkerLost")
    losses_and_norms, weights = expected(SETTINGS, NUM_STEPS)
    assert_losses_and_weights(run, [loss for loss, _ in losses_and_norms], weights)


@pytest.mark.slow
def test_two_unequal_replicas_end_a_run_without_a_rollback_target(tmp_path: Path) -> None:
    settings = with_settings(loss_monitor=LossMonitorSettings(spike_window=1))
    run = run_in_processes(
        tmp_path, settings, 2, layout="dp=2", faults=(FLIP,), audit_every=4, spike_window=1
    )
    assert exit_code(run.stopped, 0) == 1
    assert "w0 and w1 hold different bits" in run.stopped.reason
    assert "set checkpoint.every" in run.stopped.reason
    assert find_checkpoints(run.run).whole[-1].step == 8
    # A person has checked the run, and starts it again.
    resumed = run_in_processes(tmp_path, settings, 2, layout="dp=2", audit_every=4)
    assert resumed.stopped.outcome == "completed"


@pytest.mark.slow
def test_state_without_replicas_is_audited_once(tmp_path: Path) -> None:
    run = run_in_processes(tmp_path, SETTINGS, 2, layout="fsdp=2", audit_every=5)
    assert run.stopped.outcome == "completed"
    [audited] = run.lines_of("Audited")
    assert (audited["step"], audited["num_replicas"], audited["splits"]) == (5, 1, [])
