"""Whole runs with real SIGKILLs: what is computed is what the undisturbed run computes."""

from __future__ import annotations

import time
from itertools import groupby
from pathlib import Path

import pytest
import torch
from expected import expected
from harness import Outcome, run_plainly
from raising import FATAL_STEP, RAISED, SLOW_S
from run_checks import (
    assert_each_sample_once,
    assert_nothing_redone,
    survivors_keep_their_processes,
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
    return run_plainly(tmp_path_factory.mktemp("undisturbed"), SETTINGS, 1)


def recording(folder: Path, **update: object):
    samples = folder / "samples.jsonl"
    return SETTINGS.model_copy(update={"record_samples": samples, **update})


def assert_same_maths(run: Outcome, undisturbed: Outcome) -> None:
    assert run.stopped.outcome == "completed", run.stopped
    assert list(run.losses()) == list(range(1, NUM_STEPS + 1))
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)
    evaluated = {line["step"]: line["loss"] for line in run.told("Evaluated")}
    assert evaluated == pytest.approx(
        {line["step"]: line["loss"] for line in undisturbed.told("Evaluated")}, rel=1e-9
    )
    assert_same_weights(run, final_weights(undisturbed))


def final_weights(run: Outcome) -> dict[str, torch.Tensor]:
    """The parameters, put together from whatever layout wrote them."""
    [checkpoint] = (run.folder / "checkpoints").glob(f"step-{NUM_STEPS:08d}-*")
    program = TrainingProgram(SETTINGS.model_dump(mode="json"), device="cpu")
    parameters = [spec for spec in program.specs() if spec.kind == "parameter"]
    return program.read_regions(
        DiskStorage(checkpoint), {spec.name: Region.whole(spec.shape) for spec in parameters}
    )


def assert_same_weights(run: Outcome, weights: dict[str, torch.Tensor]) -> None:
    for name, weight in final_weights(run).items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-9, atol=1e-11)


def test_the_undisturbed_run_equals_the_plain_loop(undisturbed: Outcome) -> None:
    seen, weights = expected(SETTINGS, NUM_STEPS)
    losses, norms = zip(*seen, strict=True)
    assert list(undisturbed.losses().values()) == pytest.approx(losses, rel=1e-9)
    assert [line["grad_norm"] for line in undisturbed.metrics] == pytest.approx(norms, rel=1e-9)
    assert_same_weights(undisturbed, weights)


TELLING = ("compute", "world rank 0 in the vote", "forming")
"""Those of the kills below that `make test` runs."""
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
        [Fault("kill", "w3", 20, "compute"), Fault("kill", "w2", 20, "relaying")],
        {"w0", "w1"},
    ),
    "evaluation": ("dp=2,fsdp=2", [Fault("kill", "w0", 32, "evaluation")], {"w1", "w2", "w3"}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in TELLING else pytest.mark.slow) for name in KILLS],
)
def test_a_kill_changes_nothing(name: str, tmp_path: Path, undisturbed: Outcome) -> None:
    layout, faults, survivors = KILLS[name]
    num_workers = len(survivors) + len(faults)
    run = run_plainly(
        tmp_path, recording(tmp_path), num_workers, layout=layout, faults=tuple(faults)
    )
    assert_same_maths(run, undisturbed)
    assert_nothing_redone(run)
    assert_each_sample_once(run, SETTINGS.batch)
    survivors_keep_their_processes(run, survivors)
    assert len(run.told("WorkerLost")) == len(faults)


UNSEEN = [Fault("raise", "w1", 20, "reading"), Fault("kill", "w2", 20, "apply")]
"""All but w1 see the vote of step 20 decided, and w2 dies of it."""


def test_who_has_not_seen_the_vote_rolls_forward(tmp_path: Path, undisturbed: Outcome) -> None:
    run = run_plainly(tmp_path, recording(tmp_path), 4, layout="dp=4", faults=tuple(UNSEEN))
    assert_same_maths(run, undisturbed)
    assert_nothing_redone(run)
    assert_each_sample_once(run, SETTINGS.batch)
    [settled] = run.told("RolledForward")
    assert (settled["worker"], settled["record"]["step"]) == ("w1", 20)
    survivors_keep_their_processes(run, {"w0", "w1", "w3"})


@pytest.mark.slow
def test_who_cannot_roll_forward_is_replaced(tmp_path: Path, undisturbed: Outcome) -> None:
    faults = (*UNSEEN, Fault("raise", "w1", 20, "rolling_forward"))
    run = run_plainly(tmp_path, recording(tmp_path), 4, layout="dp=4", faults=faults)
    assert_same_maths(run, undisturbed)
    assert_nothing_redone(run)
    assert_each_sample_once(run, SETTINGS.batch)
    assert run.told("RollForward") and not run.told("RolledForward")
    assert {line["worker"] for line in run.told("WorkerLost")} == {"w1", "w2"}
    survivors_keep_their_processes(run, {"w0", "w3"})


@pytest.mark.slow
def test_a_survivor_that_stays_blocked_is_killed(tmp_path: Path, undisturbed: Outcome) -> None:
    """w1 hangs in code that is not torch's: another thread would hang there again."""
    faults = (Fault("kill", "w2", 20, "apply"), Fault("hang", "w1", 20, "reading"))
    run = run_plainly(tmp_path, recording(tmp_path), 4, layout="dp=4", faults=faults)
    assert_same_maths(run, undisturbed)
    assert_nothing_redone(run)
    assert_each_sample_once(run, SETTINGS.batch)
    assert {line["worker"] for line in run.told("WorkerLost")} == {"w1", "w2"}
    causes = {line["worker"]: line["cause"] for line in run.told("StopWorker")}
    assert causes == {"w1": "it did not unwind in time"}
    survivors_keep_their_processes(run, {"w0", "w3"})


@pytest.mark.slow
def test_where_everybody_stands_is_kept_when_a_worker_hangs(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """It answers probes, and no step commits; the others wait for it in a collective."""
    fault = Fault("hang", "w1", 20, "compute")
    run = run_plainly(tmp_path, SETTINGS, 3, layout="dp=3", faults=(fault,), hang_timeout_s=2.0)
    assert_same_maths(run, undisturbed)
    assert_nothing_redone(run)
    [abort] = run.told("Abort")
    assert abort["is_hang"]
    traces = {file.name: file.read_text() for file in (tmp_path / "traces").iterdir()}
    assert sorted(traces) == [f"g{abort['generation']}-{w}.txt" for w in ("w0", "w1", "w2")]
    of = {name[3:5]: text for name, text in traces.items()}
    assert "time.sleep(3600)" in of["w1"] and "thread training" in of["w1"]
    assert "time.sleep(3600)" not in of["w0"]
    assert "in wait_for" in of["w0"] and "buckets.py" in of["w0"], "it sums gradients"


def test_a_sample_that_ends_whoever_runs_it_is_named(tmp_path: Path) -> None:
    """Instead of all workers, and those that replace them, four are lost to it."""
    run = run_plainly(tmp_path, SETTINGS, 6, program="sabotage:dies_of_a_sample")
    assert run.stopped.outcome == "failed"
    # Of six, five, four and three data ranks, the one that ran number 5 also ran number 4.
    first = (12 - 1) * SETTINGS.batch
    assert SETTINGS.num_microbatches == 12 and SETTINGS.microbatch == 1
    assert "every worker that ran its microbatch 4 to 5, 4 times" in run.stopped.reason
    num_samples = TrainingProgram(SETTINGS.model_dump(mode="json")).workload.num_samples
    indices = sorted(sample_of(SETTINGS.seed, first + i, num_samples) for i in (4, 5))
    assert run.stopped.reason.endswith(f"look at training samples {indices[0]}, {indices[1]}")
    assert len(run.told("WorkerLost")) == 4
    assert run.told("Checkpointed")[-1]["step"] == 11


@pytest.mark.slow
def test_a_sample_that_ends_both_workers_costs_no_step(tmp_path: Path) -> None:
    """The second would have had the whole state alone as it read the sample."""
    run = run_plainly(tmp_path, SETTINGS, 2, program="sabotage:dies_of_a_sample")
    assert run.stopped.outcome == "failed"
    assert "4 times: look at training samples" in run.stopped.reason
    assert run.told("Checkpointed")[-1]["step"] == run.stopped.step == 11
    assert_nothing_redone(run)


@pytest.mark.slow
def test_a_held_out_sample_that_ends_workers_is_not_taken_for_training_data(
    tmp_path: Path,
) -> None:
    run = run_plainly(tmp_path, SETTINGS, 4, program="sabotage:dies_of_a_held_out_sample")
    assert run.stopped.outcome == "failed"
    assert "the evaluation after step" in run.stopped.reason
    assert "look at held-out samples" in run.stopped.reason
    assert "training samples" not in run.stopped.reason


@pytest.mark.slow
def test_a_stopped_worker_is_found_and_killed(tmp_path: Path, undisturbed: Outcome) -> None:
    fault = Fault("stop", "w1", 20, "compute")
    run = run_plainly(tmp_path, SETTINGS, 3, faults=(fault,), quiesce_deadline_s=1.0)
    assert_same_maths(run, undisturbed)
    assert_nothing_redone(run)
    assert [line["worker"] for line in run.told("WorkerLost")] == ["w1"]


def test_a_leaver_goes_at_a_boundary(tmp_path: Path, undisturbed: Outcome) -> None:
    """Shrinkage by plan: the last part of the state moves from the leaver, live."""
    leaver = (20, WorkerDraining("w1", "drained"))
    run = run_plainly(tmp_path, recording(tmp_path), 2, layout="fsdp=2", due=(leaver,))
    assert_same_maths(run, undisturbed)
    assert_nothing_redone(run)
    assert_each_sample_once(run, SETTINGS.batch)
    assert run.told("Resharded")[1]["bytes_moved"] > 0
    assert not run.told("Abort")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("dp=3", marks=pytest.mark.slow), "fsdp=3"])
def test_a_node_that_ends_before_any_boundary_is_left_at_once(
    layout: str, tmp_path: Path, undisturbed: Outcome
) -> None:
    """Whose part others have is let go; who alone has it gives it first. No step is lost."""
    notice = (20, NodeDraining("node-w1", time.time(), "a notice"))
    run = run_plainly(
        tmp_path, recording(tmp_path), 3, layout=layout, due=(notice,), node_of="node-{}".format
    )
    assert_same_maths(run, undisturbed)
    assert_nothing_redone(run)
    assert_each_sample_once(run, SETTINGS.batch)
    [abort] = run.told("Abort")
    assert ("w1" in abort["workers"]) == (layout == "fsdp=3")
    assert run.told("Resharded")[1]["source"] == "live"
    assert "w1" not in run.told("Resume")[1]["workers"]


COURSES = (
    ("dp=4", "dp=2,fsdp=2", "fsdp=4", "dp=4"),
    ("dp=4", "dp=2,tp=2", "pp=2,dp=2", "dp=4"),
)


@pytest.mark.parametrize(
    "course", [COURSES[0], pytest.param(COURSES[1], marks=pytest.mark.slow)], ids=" ".join
)
def test_the_layout_changes_as_it_is_asked_for(
    course: tuple[str, ...], tmp_path: Path, undisturbed: Outcome
) -> None:
    """Replicas become parts and replicas again, live; a layout that cannot be is refused."""
    requests = [*zip((16, 32, 48), course[1:], strict=True), (40, "fsdp=5"), (56, "dp=4")]
    due = tuple(
        (step, LayoutRequested(f"at {step}", TargetLayout.parse(lay))) for step, lay in requests
    )
    run = run_plainly(tmp_path, recording(tmp_path), 4, layout=course[0], due=due)
    assert_same_maths(run, undisturbed)
    assert_nothing_redone(run)
    assert_each_sample_once(run, SETTINGS.batch)
    survivors_keep_their_processes(run, {"w0", "w1", "w2", "w3"})
    assert len(run.told("WorkerReady")) == 4, "the processes are those that it began with"
    layouts = [line["layout"] for line in run.told("Resume")]
    assert [layout for layout, _ in groupby(layouts)] == list(course)
    assert run.told("Resharded")[-1]["bytes_moved"] > 0, "replicas anew"
    answers = {line["request"]: line for line in run.told("LayoutAnswered")}
    assert "needs 5 workers" in answers["at 40"]["refusal"]
    assert answers["at 56"]["planned"] == answers["at 56"]["present"] == "dp=4"


def test_without_replicas_the_newest_checkpoint_is_taken(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    settings = recording(tmp_path, checkpoint=CheckpointSettings(every=8))
    fault = Fault("kill", "w1", 30, "compute")
    run = run_plainly(tmp_path, settings, 2, layout="fsdp=2", faults=(fault,))
    assert_same_maths(run, undisturbed)
    [rolled_back] = run.told("RolledBack")
    assert rolled_back["step"] in (16, 24), "the newest durable one"
    assert rolled_back["from_step"] == 29
    assert_each_sample_once(run, SETTINGS.batch)
    survivors_keep_their_processes(run, {"w0"})


def test_a_bug_in_the_program_stops_the_run_and_names_the_worker(tmp_path: Path) -> None:
    fault = Fault("raise", "w1", 20, "compute")
    run = run_plainly(tmp_path, SETTINGS, 2, faults=(fault,))
    assert run.stopped.outcome == "failed"
    assert run.stopped.reason.startswith("w1: RuntimeError: injected fault: w1 raises at step 20")
    assert "Traceback" in run.stopped.traceback
    assert run.told("Checkpointed")[-1]["step"] == 19


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
def test_whatever_the_model_raises_fails_the_run_which_is_saved(
    tmp_path: Path, exception: str, slow_s: float
) -> None:
    """Also where the other worker unwinds for longer than one that hangs is waited for."""
    run = run_plainly(
        tmp_path,
        SETTINGS,
        2,
        layout="dp=2",
        program="raising:Program",
        environment={RAISED: exception, SLOW_S: str(slow_s)},
        quiesce_deadline_s=0.3,
    )
    name = exception.partition(":")[0]
    assert run.stopped.outcome == "failed", run.story()
    assert run.stopped.reason.startswith(f"w1: {name}"), run.stopped.reason
    assert "raising.py" in run.stopped.traceback and name in run.stopped.traceback
    assert run.stopped.step == FATAL_STEP - 1
    assert run.told("Checkpointed")[-1]["step"] == FATAL_STEP - 1
    assert not run.told("WorkerLost"), "nobody was ended for it"


def test_the_same_run_name_goes_on(tmp_path: Path, undisturbed: Outcome) -> None:
    """Stopped at step 30 under one layout, resumed under another."""
    first = run_plainly(tmp_path, SETTINGS.model_copy(update={"steps": 30}), 2, layout="fsdp=2")
    assert first.stopped.step == 30
    second = run_plainly(tmp_path, SETTINGS, 3, layout="dp=3")
    assert_same_maths(second, undisturbed)
    assert [line["step"] for line in second.metrics] == list(range(1, NUM_STEPS + 1))
    third = run_plainly(tmp_path, SETTINGS, 3)
    assert third.stopped.outcome == "completed"
    assert len(third.metrics) == NUM_STEPS
