"""A worker's trace of some steps by torch.profiler, kept in the run's folder for chrome://tracing.

A trace is of one stretch of steps in one generation: what an abort breaks off is kept as far as it
came, and the steps after it begin another. A profile that cannot be had is told of in the worker's
own output, and training goes on.
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

from actors.storage import Storage

FOLDER = "profiles"
TRACE = ".json.gz"


class Profiling:
    """One worker's; costs a comparison a step when no step, or another, is asked for.

    `steps` are the first and the last that are traced.
    """

    def __init__(self, run: Storage, worker: str, steps: tuple[int, int] | None) -> None:
        self._run = run
        self._worker = worker
        self._first, self._last = steps or (0, -1)
        self._trace: profile | None = None
        self._thread = 0
        """Which began it: no other can end it, as one that was left behind would try."""
        self._begun = self._newest = self._generation = 0

    @contextmanager
    def generation(self, generation: int) -> Iterator[None]:
        """Around the steps of a generation, which are all on one thread, as torch wants it."""
        self._generation = generation
        try:
            yield
        finally:
            self._keep()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step, which gets its name in the trace."""
        if not self._first <= step <= self._last:
            yield
            return
        if self._trace is None or self._thread != threading.get_ident():
            self._begin(step)
        self._newest = step
        with record_function(f"step {step}"):
            yield
        if step == self._last:
            self._keep()

    def _begin(self, step: int) -> None:
        kinds = [ProfilerActivity.CPU]
        kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        trace = profile(activities=kinds)
        try:
            trace.start()
        except Exception as error:  # whatever it is, it must not end the run
            _complain(f"step {step} cannot be traced: {error}")
            return
        self._trace, self._thread, self._begun = trace, threading.get_ident(), step

    def _keep(self) -> None:
        """Write what has been recorded, if anything has."""
        if self._trace is None or self._thread != threading.get_ident():
            return
        trace, self._trace = self._trace, None
        steps = f"{self._begun}-{self._newest}"
        name = f"{self._worker}-g{self._generation}-steps-{steps}{TRACE}"
        try:
            trace.stop()
            with tempfile.TemporaryDirectory(prefix="elastic-profile-") as folder:
                file = Path(folder) / name
                trace.export_chrome_trace(str(file))
                self._run.at(FOLDER).write(name, file.read_bytes())
        except Exception as error:  # likewise
            _complain(f"{name} could not be kept: {error}")


def _complain(text: str) -> None:
    """In the worker's own output."""
    print(f"elastic: {text}", file=sys.stderr, flush=True)
