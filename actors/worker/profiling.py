"""A worker's torch.profiler trace of some steps, written to the run folder for chrome://tracing.

Closing and writing a trace takes seconds, and an abort must not wait for it. So recording goes on
through an abort, and the trace shows the recovery, too. If profiling fails, the worker prints the
error to its own output, and training goes on.
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
    """One worker's profiler; a step that is not traced costs one comparison.

    `steps` are the first and the last step to trace.
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
        """Wrap the steps of a generation. If they end without an error, the trace is written before
        this returns, since the process may end soon."""
        self._generation = generation
        yield
        self._keep()
        if self._writing is not None:
            self._writing.join()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Wrap one step, and name it in the trace."""
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
        except Exception as error:  # profiling must not end the run
            _print_error(f"the profiler cannot trace step {step}: {error}")
            return
        self._trace = trace
        self._begun, self._begun_generation = step, self._generation

    def _keep(self) -> None:
        """Stop the current recording, if there is one, and write it in the background."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        steps = f"{self._begun}-{self._newest}"
        name = f"{self._worker}-g{self._begun_generation}-steps-{steps}{TRACE}"
        try:
            trace.stop()
        except Exception as error:  # profiling must not end the run
            _print_error(f"the profiler cannot close {name}: {error}")
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
        except Exception as error:  # profiling must not end the run
            _print_error(f"the profiler cannot write {name}: {error}")


def _print_error(text: str) -> None:
    """Print to the worker's own output."""
    print(f"elastic: {text}", file=sys.stderr, flush=True)
