"""Real processes whose microbatches are dealt by speed: faster steps, and the same losses."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from harness import Outcome, run_in_processes
from run_checks import assert_each_sample_once, assert_no_step_repeated

from actors.runtime.fault_spec import Fault
from elastic.protocol.events import ComputeTimed
from pipelines.run.recipes import tiny
from pipelines.settings import DataSettings

NUM_STEPS, BATCH = 50, 24
SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=32),
        "dtype": "float64",
        "steps": NUM_STEPS,
        "batch": BATCH,
        "eval_every": 25,
        "eval_samples": 5,
    }
)
SLOW = Fault("slow", "w1", 2, factor=8.0)
WATCHED = {"straggler_every": 5, "straggler_reports": 2}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_in_processes(tmp_path_factory.mktemp("undisturbed"), SETTINGS, 1)


def step_s_by_generation(run: Outcome) -> dict[int, float]:
    """The median time of a step; without the first steps, in which no worker is slow yet."""
    times: dict[int, list[float]] = {}
    for line in run.metrics:
        if line["step"] > 3:
            times.setdefault(line["generation"], []).append(line["step_s"])
    return {generation: median(of_steps) for generation, of_steps in times.items()}


def assert_same_training(run: Outcome, undisturbed: Outcome) -> None:
    assert run.stopped.outcome == "completed", run.stopped
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)
    held_out, expected = (
        {line["step"]: line["loss"] for line in outcome.lines_of("Evaluated")}
        for outcome in (run, undisturbed)
    )
    assert held_out == pytest.approx(expected, rel=1e-9)
    assert_each_sample_once(run, BATCH)


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["dp=4", "dp=2,fsdp=2"])
def test_steps_become_shorter_and_losses_stay_the_same(
    tmp_path: Path, undisturbed: Outcome, layout: str
) -> None:
    settings = SETTINGS.model_copy(update={"record_samples": tmp_path / "samples.jsonl"})
    run = run_in_processes(tmp_path, settings, 4, layout=layout, faults=(SLOW,), **WATCHED)
    assert_same_training(run, undisturbed)
    assert_no_step_repeated(run)
    even, *changed = [line["assignment"] for line in run.lines_of("Form")]
    assert changed and changed[0]["members"] == even["members"]
    shares = dict(zip(even["members"], changed[0]["shares"], strict=True))
    assert not even["shares"] and sum(shares.values()) == BATCH
    assert shares["w1"] == min(shares.values()) < BATCH / 4
    assert all(line["bytes_moved"] == 0 for line in run.lines_of("Resharded")[1:])
    assert not run.lines_of("Abort")
    if layout == "dp=4":  # `fsdp` spends the step of a tiny model in the collectives of each round
        times = step_s_by_generation(run)
        assert times[2] < times[1], times
    texts = [line["text"] for line in run.lines_of("Warned")]
    assert any(f"w1 computes {shares['w1']} of 24 microbatches" in text for text in texts)


@pytest.mark.slow
def test_run_with_shares_and_a_kill_equals_the_undisturbed_run(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """After the kill the members are others, and have even shares. The measured times are given, as
    those of a busy machine may hide a slow worker."""
    settings = SETTINGS.model_copy(update={"record_samples": tmp_path / "samples.jsonl"})
    run = run_in_processes(
        tmp_path,
        settings,
        4,
        min_workers=3,
        layout="dp=4",
        faults=(Fault("kill", "w2", 40),),
        due=tuple((step, ComputeTimed(1, step, (1.0, 8.0, 1.0, 1.0))) for step in (6, 8)),
        straggler_every=0,
        straggler_reports=2,
    )
    assert_same_training(run, undisturbed)
    by_generation = {line["generation"]: line["assignment"] for line in run.lines_of("Form")}
    generation = next(line["generation"] for line in run.metrics if line["step"] == 39)
    assert by_generation[generation]["shares"], "the kill strikes members with unequal shares"
    assert by_generation[generation + 1]["shares"] == []
    assert "w2" not in by_generation[generation + 1]["members"]
