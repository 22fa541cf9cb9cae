"""The tracker: follows a run's files and brings every line of them to MLflow, once it can."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.utils.validation import MAX_METRICS_PER_BATCH, MAX_PARAMS_TAGS_PER_BATCH

from pipelines.history import History
from pipelines.run_folder import RunFolder, Tail, default_tracking_uri
from pipelines.tracking.attempts import Attempts, without_credentials
from pipelines.tracking.delivered import Delivered
from pipelines.tracking.report import tags, write_files
from pipelines.tracking.rows import happening_metrics, params, step_metrics, system_metrics
from pipelines.tracking.store import connect, drop_twins, open_run, prepare_process
from pipelines.wording import counted

REPORT_EVERY_S = 60.0
REPORT_SHARE = 0.05
"""Reports, whose files grow with the run, take at most this share of the time."""
BLOCK_BYTES = 1 << 16
BLOCKS_PER_POLL = 16
STATUS = {"completed": "FINISHED", "failed": "FAILED", "user_error": "FAILED"}


class Tracker:
    """Delivers one run to one MLflow store; meant to live in a process of its own.

    Call `poll` about once a second and `finish` at the end. Neither raises when the store is
    down: the files are the spool, and what is delivered is written down in `tracking.json`.
    `trouble` says in one line why the store gets nothing at present, or is empty.
    """

    def __init__(
        self,
        folder: RunFolder,
        tracking_uri: str | None = None,
        experiment: str = "elastic",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        prepare_process()
        self.uri = tracking_uri or default_tracking_uri(folder.storage)
        self.history = History()
        self._folder = folder
        self._clock = clock
        self._journal, self._metrics = Tail(folder.journal), Tail(folder.metrics)
        self._delivered = Delivered.load(folder.tracking, self.uri, experiment)
        self._rows, self._reports = Attempts(clock), Attempts(clock)
        self._next_report = float("-inf")
        self._client: MlflowClient | None = None
        self._start_ms = 0

    @property
    def trouble(self) -> str:
        return self._rows.failure or self._reports.failure

    def poll(self) -> None:
        """Deliver what has come since, if the store lets us; blocks for seconds at most."""
        self._follow()
        if not self.history.membership.sessions:
            return
        if self._rows.run(self._deliver_rows) and self._clock() >= self._next_report:
            self._reports.run(self._deliver_report)

    def finish(self, patience_s: float) -> str | None:
        """Deliver the rest and the run's end; returns what is undelivered, in one line, or None.

        `patience_s` is how long to keep trying; one request more may be under way then.
        """
        deadline = self._clock() + patience_s
        for attempts in (self._rows, self._reports):
            attempts.forgive()
            attempts.longest_pause_s = 1.0
        is_ended = is_reported = False
        while True:
            self._follow()
            is_ended = is_ended or self._rows.run(self._deliver_end)
            is_reported = is_reported or (is_ended and self._reports.run(self._deliver_report))
            if is_reported:
                return None
            if self._clock() >= deadline:
                return self._shortfall(is_ended)
            time.sleep(0.1)

    def _follow(self) -> None:
        self.history.take(self._journal.drain(), self._metrics.drain())

    def _deliver_rows(self, num_blocks: int | None = BLOCKS_PER_POLL) -> None:
        client, run_id = self._open()
        delivered = self._delivered
        for metrics, offset in self._blocks(
            self._folder.metrics, delivered.metrics_offset, step_metrics, num_blocks
        ):
            _log_metrics(client, run_id, metrics)
            delivered.metrics_offset = offset
            delivered.save(self._folder.tracking)
        self._deliver_samples(client, run_id, num_blocks)
        happenings = self.history.membership.happenings
        if len(happenings) > delivered.num_happenings:
            told = happening_metrics(happenings, delivered.num_happenings)
            _log_metrics(client, run_id, told)
            delivered.num_happenings = len(happenings)
            delivered.save(self._folder.tracking)
