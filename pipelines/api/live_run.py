"""A run in the background: its metrics, events and status, resharding, and stop."""

from __future__ import annotations

import atexit
import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import pandas
from ray.train import Result

from actors.ray_backend.controller import DriverReport
from actors.ray_backend.driver import Drive
from pipelines.api.result import ended, in_terms_of_python
from pipelines.api.tables import Tables
from pipelines.callbacks.callback_thread import called_back
from pipelines.run.drive import started_run
from pipelines.run.plan import RunPlan
from pipelines.run.refusals import parse_layout
from pipelines.run.reshard import request_layout


class LiveRun:
    """A run started by `ElasticTrainer.start`; it ends with this process at the latest.

    As a context manager it stops the run at the end of the block.
    """

    def __init__(self, plan: RunPlan) -> None:
        """Raises `UserError` or `TrainingFailedError`."""
        self._folder = plan.folder
        self._tables = Tables(plan.folder)
        self._progress: DriverReport | None = None
        self._error: BaseException | None = None
        self._block = ExitStack()
        with in_terms_of_python():
            self._calls = self._block.enter_context(
                called_back(plan.folder, plan.callbacks, plan.recipe)
            )
            self._drive: Drive = self._block.enter_context(started_run(plan))
            self._calls.start()
        self._thread = threading.Thread(target=self._follow, name=plan.folder.name, daemon=True)
        self._thread.start()
        atexit.register(self._stop_and_wait)

    @property
    def name(self) -> str:
        """The run name, with which `ElasticTrainer` or `elastic train` resumes the run."""
        return self._folder.name

    @property
    def path(self) -> str:
        """The folder of the run, or its URL."""
        return self._folder.url

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, for any reason."""
        return not self._thread.is_alive()

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row per committed step."""
        return self._tables.metrics()

    @property
    def events(self) -> pandas.DataFrame:
        """One row per run event: time (seconds since the epoch), step, generation, world_size,
        kind and text."""
        return self._tables.events()

    @property
    def status(self) -> dict[str, Any]:
        """The output of `elastic status --json`."""
        return self._tables.run_status().as_json()

    def reshard(self, layout: str) -> str:
        """Reshard to a layout such as `dp=2,fsdp=2` at the next step boundary; return a line about
        the outcome. Raises `UserError` if it is refused, and the run keeps its layout."""
        with in_terms_of_python():
            return request_layout(self._folder, parse_layout(layout))

    def stop(self) -> Result:
        """Save and end at the next step boundary; the same name resumes the run. Returns and raises
        as `result`."""
        self._stop_and_wait()
        return self.result()

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end. Raises `TimeoutError` after `timeout_s`, `TrainingFailedError` with the
        traceback of the user's code, or `UserError`."""
        self._thread.join(timeout_s)
        if not self.is_over:
            raise TimeoutError(f"run '{self.name}' has not ended within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        assert self._progress is not None
        return ended(self._folder, self._progress, self._calls.failures)

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_and_wait()
        if error is None:
            self.result()

    def __repr__(self) -> str:
        run_status = self._tables.run_status()
        return (
            f"<run {self.name}: {run_status.phase} · {run_status.history.summary(run_status.now)}>"
        )

    def _stop_and_wait(self) -> None:
        if not self.is_over:
            self._drive.request_stop("requested by the driver")
            self._thread.join()

    def _follow(self) -> None:
        try:
            with in_terms_of_python(), self._block:
                self._progress = self._drive.follow(lambda progress: None)
                self._calls.outcome = self._progress.outcome
        except BaseException as error:
            self._error = error  # `result` raises it in the caller's thread
        finally:
            atexit.unregister(self._stop_and_wait)
