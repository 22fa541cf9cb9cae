"""Steps whose numbers are not finite change nothing; a spike is gone back from; and a bit that is
flipped in one replica is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expected import expected
from harness import Outcome, run_plainly
from run_checks import (
    assert_each_sample_once,
    assert_nothing_redone,
    survivors_keep_their_processes,
)
from spoilers import SPOILT_BATCH, SPOILT_STEP

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


def changed(**update: Any):
    return SETTINGS.model_copy(update=update)


def weights_at(run: Outcome, step: int) -> dict[str, torch.Tensor]:
    [path] = {line["path"] for line in run.told("Checkpointed") if line["step"] == step}
    program = TrainingProgram(SETTINGS.model_dump(mode="json"), device="cpu")
    wanted = {s.name: Region.whole(s.shape) for s in program.specs() if s.kind == "parameter"}
    return program.read_regions(open_storage(path), wanted)


def assert_same(run: Outcome, losses: list[float], weights: dict[str, torch.Tensor]) -> None:
    """As the plain loop, which knows of no elasticity."""
    assert run.stopped.outcome == "completed", run.stopped
    told = run.losses()
    assert list(told) == list(range(1, len(losses) + 1))
    assert [told[step] for step in told] == [
        None if loss is None else pytest.approx(loss, rel=1e-9) for loss in losses
    ]
    for name, weight in weights_at(run, run.stopped.step).items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-9, atol=1e-11)


SPOILT = {
    "nan in the loss, replicas": ("dp=2", "spoilers:nan_loss"),
    "nan in the loss, shards": ("fsdp=2", "spoilers:nan_loss"),
    "nan in the loss, tensor parallel": ("tp=2", "spoilers:nan_loss"),
    "infinite gradient, replicas": ("dp=2", "spoilers:infinite_gradient"),
    "infinite gradient, shards of ZeRO 2": ("fsdp=2,zero=2", "spoilers:infinite_gradient"),
    "overflow in the sum over the ranks": ("dp=2", "spoilers:overflowing_sum"),
    "as a fault, pipeline": ("pp=2", ""),
}


QUICK = (
    "nan in the loss, replicas",
    "infinite gradient, shards of ZeRO 2",
    "overflow in the sum over the ranks",
)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SPOILT]
)
def test_a_step_that_is_not_finite_changes_nothing(name: str, tmp_path: Path) -> None:
    layout, program = SPOILT[name]
    kind = {"program": program} if program else {"faults": (Fault("nan", "w1", SPOILT_STEP),)}
    run = run_plainly(tmp_path, changed(eval_every=1, steps=12), 2, layout=layout, **kind)
    seen, weights = expected(SETTINGS, 12, undone=(SPOILT_STEP,))
    assert_same(run, [loss for loss, _ in seen], weights)
    assert_nothing_redone(run)
    [skipped] = [line for line in run.metrics if line["skipped"]]
    assert (skipped["step"], skipped["loss"], skipped["grad_norm"]) == (SPOILT_STEP, None, None)
    rates = [line["lr"] for line in run.metrics]
    assert rates[SPOILT_STEP - 1] != rates[SPOILT_STEP - 2], "the schedule goes on"
    [warned] = run.told("Warned")
    assert (warned["kind"], warned["step"]) == ("skipped", SPOILT_STEP)
    held_out = {line["step"]: line["loss"] for line in run.told("Evaluated")}
    assert held_out[SPOILT_STEP] == held_out[SPOILT_STEP - 1] != held_out[SPOILT_STEP - 2]


@pytest.mark.slow
def test_bad_held_out_losses_are_null_and_the_run_completes_after_a_resume(tmp_path: Path) -> None:
    """Evaluations that are NaN, infinite, or count nothing; metrics, journal and status show it."""
    settings = changed(
        eval_every=1, steps=6, checkpoint=CheckpointSettings(every=2, keep_last=1, keep_best=1)
    )
    for steps in (4, 6):
        settings = settings.model_copy(update={"steps": steps})
        run = run_plainly(tmp_path, settings, 2, program="spoilers:bad_evaluations")
        assert run.stopped.outcome == "completed", run.stopped
    held_out = {line["step"]: (line["loss"], line["not_finite"]) for line in run.told("Evaluated")}
    assert held_out[2] == held_out[3] == (None, ["loss"])
    assert held_out[4] == (None, [])
    assert all(held_out[step][0] for step in (1, 5, 6))
    warned = [(line["step"], line["kind"]) for line in run.told("Warned")]
    assert warned == [(2, "not finite"), (3, "not finite"), (4, "nothing counted")]
    history = read_history(RunFolder(run.run))
    assert history.membership.num_not_finite == 2
    texts = [h.text for h in history.membership.run_events if h.kind == "evaluated"]
    assert "held-out loss not finite at step 2" in texts
    assert "held-out loss nothing counted at step 4" in texts
    assert "2 evaluations not finite" in history.summary()


def test_a_learning_rate_that_is_not_finite_skips_its_step(tmp_path: Path) -> None:
    run = run_plainly(tmp_path, changed(steps=12), 2, program="spoilers:bad_rate")
    assert run.stopped.outcome == "completed", run.stopped
    [skipped] = [line for line in run.metrics if line["skipped"]]
    assert (skipped["step"], skipped["lr"]) == (SPOILT_STEP, None)
    [warned] = run.told("Warned")
    assert "learning rate" in warned["text"]


@pytest.mark.slow
def test_too_many_in_a_row_end_the_run_and_it_is_saved(tmp_path: Path) -> None:
    """The count goes on over a kill and the re-layout after it."""
    kill = Fault("kill", "w2", SPOILT_STEP + 2)
    program = "spoilers:nan_for_ever"
    run = run_plainly(
        tmp_path, SETTINGS, 3, layout="dp=3", faults=(kill,), program=program, max_skipped=5
    )
    assert exit_code(run.stopped, 0) == 1
    steps = f"steps {SPOILT_STEP} to {SPOILT_STEP + 4} were all skipped"
    assert run.stopped.reason.startswith(steps)
    assert len(run.told("Resume")) >= 2
    assert run.stopped.step <= SPOILT_STEP + 7
    _, weights = expected(SETTINGS, SPOILT_STEP - 1)
    for name, weight in weights_at(run, run.stopped.step).items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_spike_is_gone_back_from_and_its_batches_left_out(tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    settings = changed(record_samples=samples, checkpoint=CheckpointSettings(every=5))
    watching = {"spike_factor": 3.0, "spike_window": 8, "program": "spoilers:spiking_batch"}
    run = run_plainly(tmp_path, settings, 2, layout="dp=2", **watching)
    [rolled_back] = run.told("RolledBack")
    spiked = SPOILT_BATCH + 1
    assert f"the loss of step {spiked} spiked" in rolled_back["cause"]
    back_to = rolled_back["step"]
    assert (back_to, rolled_back["source"]) in ((10, "checkpoint"), (5, "checkpoint"))
    skipped_batches = tuple(rolled_back["skipped_batches"])
    assert skipped_batches == tuple(range(back_to, spiked)), "batches count from 0"
    assert_each_sample_once(run, SETTINGS.batch, skipped_batches)
    survivors_keep_their_processes(run, {"w0", "w1"})
    seen, weights = expected(SETTINGS, NUM_STEPS, skipped_batches=skipped_batches)
    assert_same(run, [loss for loss, _ in seen], weights)
    # The same name again, under another layout, leaves the same batches out.
    more = settings.model_copy(update={"steps": NUM_STEPS + 8})
    again = run_plainly(tmp_path, more, 2, layout="fsdp=2", **watching)
    assert again.told("Resume")[-1]["skipped_batches"] == list(skipped_batches)
    assert_each_sample_once(again, SETTINGS.batch, skipped_batches)
    seen, weights = expected(more, NUM_STEPS + 8, skipped_batches=skipped_batches)
    assert_same(again, [loss for loss, _ in seen], weights)


@pytest.mark.slow
def test_a_spike_is_gone_back_from_to_a_snapshot(tmp_path: Path) -> None:
    """That of step 12; the run pauses before the next is due."""
    watching = {"spike_factor": 3.0, "spike_window": 16, "program": "spoilers:spiking_batch"}
    run = run_plainly(tmp_path, SETTINGS, 2, layout="fsdp=2", snapshot_every=6, **watching)
    [rolled_back] = run.told("RolledBack")
    assert (rolled_back["step"], rolled_back["source"]) == (SPOILT_BATCH, "snapshot")
    assert rolled_back["skipped_batches"] == [SPOILT_BATCH]
    seen, weights = expected(SETTINGS, NUM_STEPS, skipped_batches=(SPOILT_BATCH,))
    assert_same(run, [loss for loss, _ in seen], weights)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
def test_replicas_stay_equal_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    """After every step, also over re-layouts, a kill and a newcomer."""
    due = ((10, LayoutRequested("shards", TargetLayout.parse("dp=2,fsdp=2"))),)
    due += ((35, LayoutRequested("replicas", TargetLayout.parse("dp=2,tp=2"))),)
    settings = changed(dtype=dtype, steps=45)
    kill = Fault("kill", "w3", 20)
    run = run_plainly(tmp_path, settings, 4, layout="dp=4", due=due, faults=(kill,), audit_every=1)
    assert run.stopped.outcome == "completed"
    audits = run.told("Audited")
    assert len(audits) >= 40 and not any(line["splits"] for line in audits)
    assert not run.told("Warned")


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
    run = run_plainly(tmp_path, settings, num_workers, layout=layout, audit_every=1)
    assert run.stopped.outcome == "completed"
    audits = run.told("Audited")
    assert [line["step"] for line in audits] == list(range(1, 16))
    assert all(line["num_replicas"] >= 2 and not line["splits"] for line in audits)


def test_a_flipped_bit_names_its_worker_which_is_replaced(tmp_path: Path) -> None:
    """What it has done to the gradients until then stays in the parameters of all."""
    run = run_plainly(tmp_path, changed(steps=60), 3, layout="dp=3", faults=(FLIP,), audit_every=5)
    assert run.stopped.outcome == "completed"
    found, *_ = [line for line in run.told("Audited") if line["splits"]]
    assert (found["step"], found["splits"]) == (10, [[["w0", "w2"], ["w1"]]])
    assert_nothing_redone(run)
    assert {line["worker"] for line in run.told("WorkerLost")} == {"w1"}
    survivors_keep_their_processes(run, {"w0", "w2"})
    members = [set(line["workers"]) for line in run.told("Resume")]
    assert members == [{"w0", "w1", "w2"}, {"w0", "w2"}, {"w0", "w2", "w3"}]
    assert [line["step"] for line in run.told("Resume")][1] == 10, "nobody trained on in doubt"
    seen, _ = expected(SETTINGS, 11)
    losses = [loss for loss, _ in seen]
    told = list(run.losses().values())
    assert told[:6] == pytest.approx(losses[:6], rel=1e-9)
    assert told[6:10] != pytest.approx(losses[6:10], rel=1e-9), "the flip was seen in the loss"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=3", pytest.param("dp=4", marks=pytest.mark.soak)])
def test_what_a_flipped_bit_has_spoilt_can_be_undone(layout: str, tmp_path: Path) -> None:
    run = run_plainly(
        tmp_path,
        changed(checkpoint=CheckpointSettings(every=4)),
        int(layout[-1]),
        layout=layout,
        faults=(FLIP,),
        audit_every=5,
        audit_rollback=True,
    )
    [rolled_back] = run.told("RolledBack")
    assert (rolled_back["step"], rolled_back["source"]) == (4, "checkpoint")
    assert rolled_back["cause"].startswith("w1 corrupted the gradients")
    assert {line["worker"] for line in run.told("WorkerLost")} == {"w1"}
    seen, weights = expected(SETTINGS, NUM_STEPS)
    assert_same(run, [loss for loss, _ in seen], weights)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2", pytest.param("dp=2,fsdp=2", marks=pytest.mark.soak)])
def test_of_two_replicas_none_is_believed(layout: str, tmp_path: Path) -> None:
    """Back to before the last clean audit; the checkpoint of step 8 may have the flipped bit."""
    num_workers = 2 if layout == "dp=2" else 4
    run = run_plainly(
        tmp_path,
        changed(checkpoint=CheckpointSettings(every=4)),
        num_workers,
        layout=layout,
        faults=(FLIP,),
        audit_every=5,
    )
    [warned] = run.told("Warned")
    assert "w1" in warned["text"] and "no majority" in warned["text"]
    [rolled_back] = run.told("RolledBack")
    assert (rolled_back["step"], rolled_back["from_step"]) == (4, 10)
    assert not run.told("WorkerLost")
    seen, weights = expected(SETTINGS, NUM_STEPS)
    assert_same(run, [loss for loss, _ in seen], weights)


@pytest.mark.slow
def test_two_replicas_and_nothing_to_go_back_to_end_the_run(tmp_path: Path) -> None:
    settings = changed(loss_monitor=LossMonitorSettings(spike_window=1))
    run = run_plainly(
        tmp_path, settings, 2, layout="dp=2", faults=(FLIP,), audit_every=4, spike_window=1
    )
    assert exit_code(run.stopped, 0) == 1
    assert "w0 and w1 hold different bits" in run.stopped.reason
    assert "set checkpoint.every" in run.stopped.reason
    assert find_checkpoints(run.run).whole[-1].step == 8
    # A person has looked, and begins it again.
    again = run_plainly(tmp_path, settings, 2, layout="dp=2", audit_every=4)
    assert again.stopped.outcome == "completed"


@pytest.mark.slow
def test_one_copy_alone_is_looked_at_once(tmp_path: Path) -> None:
    run = run_plainly(tmp_path, SETTINGS, 2, layout="fsdp=2", audit_every=5)
    assert run.stopped.outcome == "completed"
    [audited] = run.told("Audited")
    assert (audited["step"], audited["num_replicas"], audited["splits"]) == (5, 1, [])
