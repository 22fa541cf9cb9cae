"""A worker's trace of some steps by torch.profiler, kept in the run's folder for chrome://tracing.

An abort must not wait for a trace, which takes seconds to be closed and written: recording goes on
through it, and the recovery is in the trace as well. A profile that cannot be had is told of in the
worker's own output, and training goes on.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from actors.distributed.torch_private import all_threads
from actors.storage.file_names import PROFILES, TRACE
from actors.storage.storage import Storage


class Profiling:
    """One worker's; costs a comparison a step when no step, or another, is asked for.

    `steps` are the first and the last that are traced.
    """

    def __init__(self, run: Storage, worker: str, steps: tuple[int, int] | None) -> None:
        self._run = run
        self._worker = worker
        self._first, self._last = steps or (0, -1)
        self._trace: profile | None = None
        self._begun = self._newest = self._generation = self._begun_generation = 0
        self._writing: threading.Thread | None = None

    @contextmanager
    def generation(self, generation: int) -> Iterator[None]:
        """Around the steps of a generation. If they end in order, what is recorded is written
        before this ends; the process may not live for long then."""
        self._generation = generation
        yield
        self._keep()
        if self._writing is not None:
            self._writing.join()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step, which gets its name in the trace."""
        if not self._first <= step <= self._last:
            self._keep()
            yield
            return
        if self._trace is None:
            self._begin(step)
        self._newest = step
        with record_function(f"step {step}"):
            yield
        if step == self._last:
            self._keep()

    def _begin(self, step: int) -> None:
        kinds = [ProfilerActivity.CPU]
        kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        try:
            trace = profile(activities=kinds, experimental_config=all_threads())
            trace.start()
        except Exception as error:  # whatever it is, it must not end the run
            _complain(f"step {step} cannot be traced: {error}")
            return
        self._trace = trace
        self._begun, self._begun_generation = step, self._generation

    def _keep(self) -> None:
        """End what is being recorded, if anything is, and have it written."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        steps = f"{self._begun}-{self._newest}"
        name = f"{self._worker}-g{self._begun_generation}-steps-{steps}{TRACE}"
        try:
            trace.stop()
        except Exception as error:  # likewise
            _complain(f"{name} could not be ended: {error}")
            return
        self._writing = threading.Thread(
            target=self._write, args=(trace, name), name="profile", daemon=True
        )
        self._writing.start()

    def _write(self, trace: profile, name: str) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="elastic-profile-") as folder:
                file = Path(folder) / name
                trace.export_chrome_trace(str(file))
                self._run.at(PROFILES).write(name, file.read_bytes())
        except Exception as error:  # likewise
            _complain(f"{name} could not be kept: {error}")


def _complain(text: str) -> None:
    """In the worker's own output."""
    print(f"elastic: {text}", file=sys.stderr, flush=True)
