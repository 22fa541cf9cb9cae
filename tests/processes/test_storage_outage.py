"""Storage outages that last longer than the training: the run loses nothing."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import Outcome, run_in_processes
from s3 import S3Proxy

from actors.controller.shell import Shell
from actors.storage.checkpoint_files import find_checkpoints
from elastic.protocol.events import Event, StepCommitted
from pipelines.run.recipes import tiny
from pipelines.settings import CheckpointSettings, DataSettings

SETTINGS = tiny().model_copy(
    update={
        "data": DataSettings(source="random", seq_len=16),
        "steps": 100,
        "checkpoint": CheckpointSettings(every=20),
    }
)
DISK_BYTES, OUTAGE_S = 32 << 20, 20.0


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A separate in-memory file system."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here: that needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


class Outage:
    """Begins when step 30 commits, and ends `OUTAGE_S` after the last step has committed."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.troubles: list[str] = []
        self._begin, self._end = begin, end
        self._shell: Shell | None = None
        self._over = threading.Event()

    def watch(self, shell: Shell) -> None:
        self._shell = shell
        threading.Thread(target=self._poll, daemon=True).start()

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepCommitted) and event.record.step == 30:
            self._begin()
        if isinstance(event, StepCommitted) and event.record.step == SETTINGS.steps:
            threading.Timer(OUTAGE_S, self._end).start()

    def close(self) -> None:
        self._over.set()

    def _poll(self) -> None:
        """Poll `Shell.trouble`, as the display does."""
        assert self._shell is not None
        while not self._over.wait(0.2):
            trouble = self._shell.trouble
            if trouble and trouble not in self.troubles[-1:]:
                self.troubles.append(trouble)


def train(folder: Path | str, outage: Outage) -> Outcome:
    began = time.monotonic()
    try:
        outcome = run_in_processes(
            folder, SETTINGS, 2, on_event=outage.on_event, on_shell=outage.watch, timeout_s=240.0
        )
    finally:
        outage.close()
    assert time.monotonic() - began > OUTAGE_S
    return outcome


def is_complete(outcome: Outcome) -> bool:
    stopped = outcome.stopped
    assert (stopped.outcome, stopped.step) == ("completed", 100), outcome.story()
    assert [line["step"] for line in outcome.metrics] == list(range(1, 101))
    assert outcome.lines_of("Stopped")
    checkpoints = find_checkpoints(outcome.run)
    return (
        checkpoints.whole[-1].step == 100
        and not checkpoints.complaints
        and not checkpoints.unfinished
    )


@pytest.mark.soak
def test_run_completes_if_a_full_disk_gets_space_within_a_minute(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        filler = disk / "filler"

        def fill() -> None:
            with open(filler, "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1 << 16))
                except OSError as error:
                    assert error.errno == 28, error

        outage = Outage(fill, filler.unlink)
        outcome = train(disk / "run", outage)
        assert is_complete(outcome)
        trouble = outage.troubles[-1]
        assert "the checkpoint of step" in trouble and "No space left on device" in trouble
        assert any("of journal.jsonl" in trouble for trouble in outage.troubles)


@pytest.mark.slow
@pytest.mark.soak
def test_run_completes_if_an_object_store_answers_within_a_minute(s3_proxy: S3Proxy) -> None:
    outage = Outage(s3_proxy.close, s3_proxy.open)
    outcome = train(s3_proxy.url_of("run"), outage)
    # Once, in a whole CI run, each part of one worker was stored with the framing of its upload
    # (aws-chunked). The uploads show whether the client or the server is at fault.
    assert outcome.stopped.outcome == "completed", "\n\n".join(s3_proxy.upload_headers)
    assert is_complete(outcome)
    assert any("the checkpoint of step" in trouble for trouble in outage.troubles)
    assert any("of journal.jsonl" in trouble for trouble in outage.troubles)
