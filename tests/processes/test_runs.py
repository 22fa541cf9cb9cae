"""Whole runs with real SIGKILLs: they compute what the undisturbed run computes."""

from __future__ import annotations

import time
from itertools import groupby
from pathlib import Path

import pytest
import torch
from expected import expected
from harness import Outcome, run_in_processes
from raising_program import FATAL_STEP, RAISED, SLOW_S
from run_checks import (
    assert_each_sample_once,
    assert_no_step_repeated,
    assert_survivors_kept,
)

from actors.runtime.fault_spec import Fault
from actors.storage.storage import DiskStorage
from elastic.geometry.regions import Region
from elastic.geometry.sample_order import sample_of
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested, NodeDraining, WorkerDraining
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import tiny
from pipelines.settings import CheckpointSettings, DataSettings

NUM_STEPS = 64
SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "steps": NUM_STEPS,
        "eval_every": 16,
        "eval_samples": 4,
    }
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_in_processes(tmp_path_factory.mktemp("undisturbed"), SETTINGS, 1)


def with_recorded_samples(folder: Path, **update: object):
    samples = folder / "samples.jsonl"
    return SETTINGS.model_copy(update={"record_samples": samples, **update})


def assert_same_training(run: Outcome, undisturbed: Outcome) -> None:
    assert run.stopped.outcome == "completed", run.stopped
    assert list(run.losses()) == list(range(1, NUM_STEPS + 1))
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)
    held_out_losses = {line["step"]: line["loss"] for line in run.lines_of("Evaluated")}
    assert held_out_losses == pytest.approx(
        {line["step"]: line["loss"] for line in undisturbed.lines_of("Evaluated")}, rel=1e-9
    )
    assert_same_weights(run, final_weights(undisturbed))


def final_weights(run: Outcome) -> dict[str, torch.Tensor]:
    """Read the whole parameters from the last checkpoint, whatever layout wrote it."""
    [checkpoint] = (run.folder / "checkpoints").glob(f"step-{NUM_STEPS:08d}-*")
    program = TrainingProgram(SETTINGS.model_dump(mode="json"), device="cpu")
    parameters = [spec for spec in program.specs() if spec.kind == "parameter"]
    return program.read_regions(
        DiskStorage(checkpoint), {spec.name: Region.whole(spec.shape) for spec in parameters}
    )


def assert_same_weights(run: Outcome, weights: dict[str, torch.Tensor]) -> None:
    for name, weight in final_weights(run).items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-9, atol=1e-11)


def test_undisturbed_run_equals_the_plain_loop(undisturbed: Outcome) -> None:
    losses_and_norms, weights = expected(SETTINGS, NUM_STEPS)
    losses, norms = zip(*losses_and_norms, strict=True)
    assert list(undisturbed.losses().values()) == pytest.approx(losses, rel=1e-9)
    assert [line["grad_norm"] for line in undisturbed.metrics] == pytest.approx(norms, rel=1e-9)
    assert_same_weights(undisturbed, weights)


QUICK_KILLS = ("compute", "world rank 0 in the vote", "forming")
"""The kills below that `make test` runs."""
KILLS = {
    "compute": ("dp=3", [Fault("kill", "w2", 20, "compute")], {"w0", "w1"}),
    "world rank 0 in the vote": ("dp=3", [Fault("kill", "w0", 20, "vote")], {"w1", "w2"}),
    "world rank 0 in apply": ("dp=3", [Fault("kill", "w0", 20, "apply")], {"w1", "w2"}),
    "apply of a shard": ("dp=2,fsdp=2", [Fault("kill", "w1", 20, "apply")], {"w0", "w2", "w3"}),
    "two at once": (
        "dp=4",
        [Fault("kill", "w1", 20, "compute"), Fault("kill", "w3", 20, "compute")],
        {"w0", "w2"},
    ),
    "forming": (
        "dp=4",
        [Fault("kill", "w3", 20, "compute"), Fault("kill", "w1", 20, "forming")],
        {"w0", "w2"},
    ),
    "resharding": (
        "dp=2,fsdp=2",
        [Fault("kill", "w3", 20, "compute"), Fault("kill", "w2", 20, "resharding")],
        {"w0", "w1"},
    ),
    "evaluation": ("dp=2,fsdp=2", [Fault("kill", "w0", 32, "evaluation")], {"w1", "w2", "w3"}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK_KILLS else pytest.mark.slow) for name in KILLS],
)
def test_kill_changes_no_loss_weight_or_sample(
    name: str, tmp_path: Path, undisturbed: Outcome
) -> None:
    layout, faults, survivors = KILLS[name]
    num_workers = len(survivors) + len(faults)
    run = run_in_processes(
        tmp_path, with_recorded_samples(tmp_path), num_workers, layout=layout, faults=tuple(faults)
    )
    assert_same_training(run, undisturbed)
    assert_no_step_repeated(run)
    assert_each_sample_once(run, SETTINGS.batch)
    assert_survivors_kept(run, survivors)
    assert len(run.lines_of("WorkerLost")) == len(faults)


VOTE_UNSEEN_BY_W1 = [Fault("raise", "w1", 20, "reading"), Fault("kill", "w2", 20, "apply")]
"""All workers except w1 see the vote of step 20; w2 dies when it applies the step."""


def test_survivor_without_the_vote_rolls_forward(tmp_path: Path, undisturbed: Outcome) -> None:
    run = run_in_processes(
        tmp_path, with_recorded_samples(tmp_path), 4, layout="dp=4", faults=tuple(VOTE_UNSEEN_BY_W1)
    )
    assert_same_training(run, undisturbed)
    assert_no_step_repeated(run)
    assert_each_sample_once(run, SETTINGS.batch)
    [rolled_forward] = run.lines_of("RolledForward")
    assert (rolled_forward["worker"], rolled_forward["record"]["step"]) == ("w1", 20)
    assert_survivors_kept(run, {"w0", "w1", "w3"})


@pytest.mark.slow
def test_survivor_that_cannot_roll_forward_is_replaced(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    faults = (*VOTE_UNSEEN_BY_W1, Fault("raise", "w1", 20, "rolling_forward"))
    run = run_in_processes(
        tmp_path, with_recorded_samples(tmp_path), 4, layout="dp=4", faults=faults
    )
    assert_same_training(run, undisturbed)
    assert_no_step_repeated(run)
    assert_each_sample_once(run, SETTINGS.batch)
    assert run.lines_of("RollForward") and not run.lines_of("RolledForward")
    assert {line["worker"] for line in run.lines_of("WorkerLost")} == {"w1", "w2"}
    assert_survivors_kept(run, {"w0", "w3"})


@pytest.mark.slow
def test_blocked_survivor_is_killed(tmp_path: Path, undisturbed: Outcome) -> None:
    """w1 hangs in code outside of torch, where a further thread would hang too."""
    faults = (Fault("kill", "w2", 20, "apply"), Fault("hang", "w1", 20, "reading"))
    settings = with_recorded_samples(tmp_path)
    run = run_in_processes(
        tmp_path, settings, 4, layout="dp=4", faults=faults, collective_timeout_s=10.0
    )
    assert_same_training(run, undisturbed)
    assert_no_step_repeated(run)
    assert_each_sample_once(run, SETTINGS.batch)
    assert {line["worker"] for line in run.lines_of("WorkerLost")} == {"w1", "w2"}
    causes = {line["worker"]: line["cause"] for line in run.lines_of("StopWorker")}
    assert causes == {"w1": "it did not unwind in time"}
    assert_survivors_kept(run, {"w0", "w3"})


@pytest.mark.slow
def test_hang_stores_the_stack_traces_of_all_workers(tmp_path: Path, undisturbed: Outcome) -> None:
    """The hung worker answers probes, but no step commits: the others wait in a collective."""
    fault = Fault("hang", "w1", 20, "compute")
    run = run_in_processes(
        tmp_path, SETTINGS, 3, layout="dp=3", faults=(fault,), hang_timeout_s=2.0
    )
    assert_same_training(run, undisturbed)
    assert_no_step_repeated(run)
    [abort] = run.lines_of("Abort")
    assert abort["is_hang"]
    traces = {file.name: file.read_text() for file in (tmp_path / "traces").iterdir()}
    assert sorted(traces) == [f"g{abort['generation']}-{w}.txt" for w in ("w0", "w1", "w2")]
    trace_of = {name[3:5]: text for name, text in traces.items()}
    assert "time.sleep(3600)" in trace_of["w1"] and "thread training" in trace_of["w1"]
    assert "time.sleep(3600)" not in trace_of["w0"]
    assert "in wait_for" in trace_of["w0"] and "buckets.py" in trace_of["w0"], (
        "w0 waits in the reduction of gradients"
    )


def test_sample_that_kills_its_workers_is_reported_by_index(tmp_path: Path) -> None:
    """The run loses four workers to the sample, and not every worker and replacement."""
    run = run_in_processes(tmp_path, SETTINGS, 6, program="mistaken_programs:dies_of_a_sample")
    assert run.stopped.outcome == "failed"
    # With six, five, four and three data ranks, the rank of microbatch 5 also ran microbatch 4.
    first = (12 - 1) * SETTINGS.batch
    assert SETTINGS.num_microbatches == 12 and SETTINGS.microbatch == 1
    assert "every worker that ran its microbatch 4 to 5, 4 times" in run.stopped.reason
    num_samples = TrainingProgram(SETTINGS.model_dump(mode="json")).workload.num_samples
    indices = sorted(sample_of(SETTINGS.seed, first + i, num_samples) for i in (4, 5))
    assert run.stopped.reason.endswith(f"look at training samples {indices[0]}, {indices[1]}")
    assert len(run.lines_of("WorkerLost")) == 4
    assert run.lines_of("Checkpointed")[-1]["step"] == 11


@pytest.mark.slow
def test_sample_that_kills_both_workers_loses_no_step(tmp_path: Path) -> None:
    """The second worker would be the only one with the whole state when it reads the sample."""
    run = run_in_processes(tmp_path, SETTINGS, 2, program="mistaken_programs:dies_of_a_sample")
    assert run.stopped.outcome == "failed"
    assert "4 times: look at training samples" in run.stopped.reason
    assert run.lines_of("Checkpointed")[-1]["step"] == run.stopped.step == 11
    assert_no_step_repeated(run)


@pytest.mark.slow
def test_held_out_sample_that_kills_workers_is_reported_as_held_out(
    tmp_path: Path,
) -> None:
    run = run_in_processes(
        tmp_path, SETTINGS, 4, program="mistaken_programs:dies_of_a_held_out_sample"
    )
    assert run.stopped.outcome == "failed"
    assert "the evaluation after step" in run.stopped.reason
    assert "look at held-out samples" in run.stopped.reason
    assert "training samples" not in run.stopped.reason


@pytest.mark.slow
def test_worker_stopped_by_signal_is_detected_and_killed(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    fault = Fault("stop", "w1", 20, "compute")
    run = run_in_processes(tmp_path, SETTINGS, 3, faults=(fault,), quiesce_deadline_s=1.0)
    assert_same_training(run, undisturbed)
    assert_no_step_repeated(run)
    assert [line["worker"] for line in run.lines_of("WorkerLost")] == ["w1"]


def test_drained_worker_leaves_at_a_step_boundary(tmp_path: Path, undisturbed: Outcome) -> None:
    """A planned shrink: the last shard of the state moves from the draining worker."""
    drain = (20, WorkerDraining("w1", "drained"))
    run = run_in_processes(
        tmp_path, with_recorded_samples(tmp_path), 2, layout="fsdp=2", due=(drain,)
    )
    assert_same_training(run, undisturbed)
    assert_no_step_repeated(run)
    assert_each_sample_once(run, SETTINGS.batch)
    assert run.lines_of("Resharded")[1]["bytes_moved"] > 0
    assert not run.lines_of("Abort")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("dp=3", marks=pytest.mark.slow), "fsdp=3"])
def test_node_that_ends_before_the_next_boundary_loses_its_workers_at_once(
    layout: str, tmp_path: Path, undisturbed: Outcome
) -> None:
    """A worker that alone holds its shard sends it first; others are dropped. No step is lost.

    The steps are slow: else the run may have ended before a busy machine handles the notice.
    """
    notice = (20, NodeDraining("node-w1", time.time(), "a notice"))
    run = run_in_processes(
        tmp_path,
        with_recorded_samples(tmp_path),
        3,
        layout=layout,
        due=(notice,),
        faults=(Fault("slow", "w0", 1, factor=5.0),),
        node_of="node-{}".format,
    )
    assert_same_training(run, undisturbed)
    assert_no_step_repeated(run)
    assert_each_sample_once(run, SETTINGS.batch)
    [abort] = run.lines_of("Abort")
    assert ("w1" in abort["workers"]) == (layout == "fsdp=3")
    assert run.lines_of("Resharded")[1]["source"] == "live"
    assert "w1" not in run.lines_of("Resume")[1]["workers"]


LAYOUT_SEQUENCES = (
    ("dp=4", "dp=2,fsdp=2", "fsdp=4", "dp=4"),
    ("dp=4", "dp=2,tp=2", "pp=2,dp=2", "dp=4"),
)


@pytest.mark.parametrize(
    "course",
    [LAYOUT_SEQUENCES[0], pytest.param(LAYOUT_SEQUENCES[1], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_layout_requests_reshard_a_running_run(
    course: tuple[str, ...], tmp_path: Path, undisturbed: Outcome
) -> None:
    """Live reshards from replicas to shards and back; the run refuses an infeasible layout."""
    requests = [*zip((16, 32, 48), course[1:], strict=True), (40, "fsdp=5"), (56, "dp=4")]
    due = tuple(
        (step, LayoutRequested(f"at {step}", TargetLayout.parse(text))) for step, text in requests
    )
    run = run_in_processes(tmp_path, with_recorded_samples(tmp_path), 4, layout=course[0], due=due)
    assert_same_training(run, undisturbed)
    assert_no_step_repeated(run)
    assert_each_sample_once(run, SETTINGS.batch)
    assert_survivors_kept(run, {"w0", "w1", "w2", "w3"})
    assert len(run.lines_of("WorkerReady")) == 4, "the same processes from start to end"
    trained = [line["layout"] for line in run.lines_of("Resume")]
    assert [layout for layout, _ in groupby(trained)] == list(course)
    assert run.lines_of("Resharded")[-1]["bytes_moved"] > 0, "the shards become replicas again"
    answers = {line["request"]: line for line in run.lines_of("LayoutAnswered")}
    assert "needs 5 workers" in answers["at 40"]["refusal"]
    assert answers["at 56"]["planned"] == answers["at 56"]["present"] == "dp=4"


def test_loss_of_a_shard_without_replicas_rolls_back_to_the_newest_checkpoint(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    settings = with_recorded_samples(tmp_path, checkpoint=CheckpointSettings(every=8))
    fault = Fault("kill", "w1", 30, "compute")
    run = run_in_processes(tmp_path, settings, 2, layout="fsdp=2", faults=(fault,))
    assert_same_training(run, undisturbed)
    [rolled_back] = run.lines_of("RolledBack")
    assert rolled_back["step"] in (16, 24), "the newest durable checkpoint"
    assert rolled_back["from_step"] == 29
    assert_each_sample_once(run, SETTINGS.batch)
    assert_survivors_kept(run, {"w0"})


def test_exception_in_the_program_stops_the_run_and_names_the_worker(tmp_path: Path) -> None:
    fault = Fault("raise", "w1", 20, "compute")
    run = run_in_processes(tmp_path, SETTINGS, 2, faults=(fault,))
    assert run.stopped.outcome == "failed"
    assert run.stopped.reason.startswith("w1: RuntimeError: injected fault: w1 raises at step 20")
    assert "Traceback" in run.stopped.traceback
    assert run.lines_of("Checkpointed")[-1]["step"] == 19


@pytest.mark.parametrize(
    ("exception", "slow_s"),
    [
        ("RuntimeError", 0.0),
        ("KeyboardInterrupt", 0.0),
        ("SystemExit:0", 0.0),
        ("GeneratorExit", 0.0),
        ("RuntimeError", 2.0),
        ("SystemExit:0", 2.0),
    ],
)
def test_exception_of_the_model_fails_the_run_after_a_checkpoint(
    tmp_path: Path, exception: str, slow_s: float
) -> None:
    """Also if the other worker unwinds for longer than `failure.quiesce_deadline_s`."""
    run = run_in_processes(
        tmp_path,
        SETTINGS,
        2,
        layout="dp=2",
        program="raising_program:Program",
        environment={RAISED: exception, SLOW_S: str(slow_s)},
        quiesce_deadline_s=0.3,
    )
    name = exception.partition(":")[0]
    assert run.stopped.outcome == "failed", run.story()
    assert run.stopped.reason.startswith(f"w1: {name}"), run.stopped.reason
    assert "raising_program.py" in run.stopped.traceback and name in run.stopped.traceback
    assert run.stopped.step == FATAL_STEP - 1
    assert run.lines_of("Checkpointed")[-1]["step"] == FATAL_STEP - 1
    assert not run.lines_of("WorkerLost"), "the run killed no worker"


def test_run_with_the_same_name_resumes(tmp_path: Path, undisturbed: Outcome) -> None:
    """The run completes 30 steps under one layout, then continues under another."""
    first = run_in_processes(
        tmp_path, SETTINGS.model_copy(update={"steps": 30}), 2, layout="fsdp=2"
    )
    assert first.stopped.step == 30
    second = run_in_processes(tmp_path, SETTINGS, 3, layout="dp=3")
    assert_same_training(second, undisturbed)
    assert [line["step"] for line in second.metrics] == list(range(1, NUM_STEPS + 1))
    third = run_in_processes(tmp_path, SETTINGS, 3)
    assert third.stopped.outcome == "completed"
    assert len(third.metrics) == NUM_STEPS
