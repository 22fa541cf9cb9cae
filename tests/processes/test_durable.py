"""Checkpoints in failing storage: damaged files, full disks, an S3 outage."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from threading import Timer

import pytest
from harness import Outcome, run_in_processes
from run_checks import assert_no_step_repeated
from s3 import CREDENTIALS, S3Proxy

from actors.runtime.fault_spec import Fault
from elastic.protocol.events import Event, PartFailed, StepCommitted
from pipelines.run.recipes import tiny
from pipelines.settings import CheckpointSettings, DataSettings

NUM_STEPS = 48
SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "dtype": "float64",
        "steps": NUM_STEPS,
        "checkpoint": CheckpointSettings(every=8),
    }
)


def with_steps(step: int):
    return SETTINGS.model_copy(update={"steps": step})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_in_processes(tmp_path_factory.mktemp("undisturbed"), SETTINGS, 1)


def assert_same_losses(run: Outcome, undisturbed: Outcome) -> None:
    assert run.stopped.outcome == "completed", run.stopped
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-9)
    assert list(run.losses()) == list(range(1, NUM_STEPS + 1))


def list_checkpointed_steps(run: Outcome) -> list[int]:
    manifests = run.run.files("checkpoints")
    return [json.loads(run.run.read(n))["step"] for n in sorted(manifests) if "manifest.json" in n]


def test_damaged_checkpoints_are_skipped(tmp_path: Path, undisturbed: Outcome) -> None:
    """Of 8, 16, 24 and 30 the newest has a flipped bit, and the one before is truncated."""
    first = run_in_processes(tmp_path, with_steps(30), 2, layout="fsdp=2")
    assert list_checkpointed_steps(first) == [8, 16, 24, 30]
    flipped, truncated = (
        next((tmp_path / "checkpoints").glob(f"step-*{n}-*/part-w1*")) for n in (30, 24)
    )
    content = bytearray(flipped.read_bytes())
    content[len(content) * 2 // 3] ^= 16
    flipped.write_bytes(content)
    truncated.write_bytes(truncated.read_bytes()[:-1])
    run = run_in_processes(tmp_path, SETTINGS, 3, layout="dp=3")
    assert_same_losses(run, undisturbed)
    assert str(flipped) in run.lines_of("CheckpointDamaged")[0]["cause"]
    assert any(str(truncated) in line.get("warning", "") for line in run.journal)
    assert run.lines_of("RolledBack")[0]["step"] == 16
    assert not (flipped.parent / "manifest.json").exists(), "the run never reads it again"


@pytest.mark.parametrize("moment", ["writing", pytest.param("written", marks=pytest.mark.slow)])
def test_worker_death_while_writing_a_part_publishes_nothing(
    tmp_path: Path, undisturbed: Outcome, moment: str
) -> None:
    """The surviving worker makes the due checkpoint again: at once, since it alone has the state
    and the next step has ended the other attempt, or at the next boundary."""
    fault = Fault("kill", "w1", 16, moment)
    run = run_in_processes(tmp_path, SETTINGS, 2, layout="dp=2", faults=(fault,), keep_last=0)
    assert_same_losses(run, undisturbed)
    assert_no_step_repeated(run)
    checkpointed = run.lines_of("Checkpointed")
    steps = [line["step"] for line in checkpointed]
    lost_in = next(line["generation"] for line in run.lines_of("WorkerLost"))
    assert (16, lost_in) not in [(line["step"], line["generation"]) for line in checkpointed]
    assert min(s for s in steps if s >= 16) < 24
    assert list_checkpointed_steps(run) == steps
    folders = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert len(folders) == len(steps), "the files of the failed attempt are removed"


@pytest.mark.slow
def test_newest_multiples_and_best_checkpoints_are_kept(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    run = run_in_processes(tmp_path, SETTINGS, 2, keep_last=2, keep_every=16)
    assert_same_losses(run, undisturbed)
    assert list_checkpointed_steps(run) == [16, 32, 40, 48]


@pytest.mark.slow
def test_checkpoints_by_time(tmp_path: Path, undisturbed: Outcome) -> None:
    settings = SETTINGS.model_copy(update={"checkpoint": CheckpointSettings(every=0)})
    run = run_in_processes(tmp_path, settings, 2, layout="fsdp=2", checkpoint_every_s=0.2)
    assert_same_losses(run, undisturbed)
    times = [line["time"] for line in run.lines_of("RequestCheckpoint")]
    assert len(times) >= 2 and all(b - a >= 0.2 for a, b in pairwise(times))
    assert [line["step"] for line in run.lines_of("Checkpointed")] == list_checkpointed_steps(run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB; a checkpoint takes 2.4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_training_continues_on_a_full_disk(small_disk: Path, undisturbed: Outcome) -> None:
    """Two checkpoints fit; 0.2 s after the third has failed, the disk grows."""

    def grow() -> None:
        subprocess.run(["mount", "-o", "remount,size=60m", small_disk], check=True)

    timers: list[Timer] = []

    def watch(event: Event) -> None:
        if isinstance(event, PartFailed) and not timers:
            timers.append(Timer(0.2, grow))
            timers[0].start()

    run = run_in_processes(
        small_disk, SETTINGS, 2, layout="fsdp=2", on_event=watch, save_backoff_s=0.1, keep_last=0
    )
    assert_same_losses(run, undisturbed)
    assert_no_step_repeated(run)
    assert "No space left" in run.lines_of("PartFailed")[0]["cause"]
    steps = list_checkpointed_steps(run)
    assert steps[:2] == [8, 16] and steps[-1] == NUM_STEPS
    assert steps == [line["step"] for line in run.lines_of("Checkpointed")]


@pytest.mark.slow
def test_s3_outage_then_resume_under_another_layout(
    s3_proxy: S3Proxy, undisturbed: Outcome
) -> None:
    """The server is down from step 20 until writing the last checkpoint has failed."""

    def watch(event: Event) -> None:
        if isinstance(event, StepCommitted) and event.record.step == 20:
            s3_proxy.close()
        elif isinstance(event, PartFailed) and event.step == 30:
            s3_proxy.open()

    first = run_in_processes(
        s3_proxy.url,
        with_steps(30),
        2,
        layout="fsdp=2",
        on_event=watch,
        environment=CREDENTIALS,
        save_backoff_s=0.1,
    )
    assert first.stopped.outcome == "completed", first.stopped
    assert_no_step_repeated(first)
    assert list_checkpointed_steps(first)[-1] == 30
    second = run_in_processes(s3_proxy.url, SETTINGS, 3, layout="dp=3", environment=CREDENTIALS)
    assert_same_losses(second, undisturbed)
    assert second.lines_of("Resharded")[-1]["source"] == "checkpoint"
    assert [line["step"] for line in second.metrics] == list(range(1, NUM_STEPS + 1))
