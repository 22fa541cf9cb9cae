"""Delivery of a run's new lines and files to the tracking store, in order and in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.utils.validation import MAX_METRICS_PER_BATCH, MAX_PARAMS_TAGS_PER_BATCH

from actors.storage.file_names import PROFILES, TRACE
from actors.storage.line_logs import LineLog
from pipelines.observe.history.history import History
from pipelines.observe.history.run_folder import TIMELINE, RunFolder, Tail
from pipelines.observe.tracking.delivered import Delivered
from pipelines.observe.tracking.report import tags, write_files
from pipelines.observe.tracking.rows import (
    event_metrics,
    params,
    reading_metrics,
    statistics_metrics,
    step_metrics,
    system_metrics,
)
from pipelines.observe.tracking.store import connect, delete_duplicate_runs, open_run

BLOCK_BYTES = 1 << 15
"""About as many lines as fill one batch of metrics."""
STATUS = {"completed": "FINISHED", "failed": "FAILED", "user_error": "FAILED"}


class Delivery:
    """Delivers one run to one store. Every method may raise any exception of the store."""

    def __init__(
        self, folder: RunFolder, uri: str, experiment: str, clock: Callable[[], float]
    ) -> None:
        self._folder = folder
        self._uri = uri
        self._clock = clock
        self._experiment = experiment
        self._known: Delivered | None = None
        self._client: MlflowClient | None = None
        self._is_open = self._has_ended = False
        self._start_ms = 0

    @property
    def _delivered(self) -> Delivered:
        """The stored progress, read when first needed, since the storage may not answer."""
        if self._known is None:
            self._known = Delivered.load(self._folder.files, self._uri, self._experiment)
        return self._known

    def rows(self, history: History, until: float) -> None:
        """Deliver lines until there are no more or the clock reaches `until`."""
        client = self._open(history)
        self._run_events(client, history)
        self._readings(client, history)
        device = history.step_time.device
        row_metrics = partial(step_metrics, unit=history.progress.unit, device=device)
        self._blocks(client, self._folder.metrics, "metrics_offset", row_metrics, until)
        sample_metrics = partial(system_metrics, start_ms=self._start_ms)
        self._blocks(client, self._folder.system, "system_offset", sample_metrics, until)
        statistics = self._folder.statistics
        self._blocks(client, statistics, "statistics_offset", statistics_metrics, until)

    def num_waiting(self) -> int:
        """The number of lines that the store does not have yet."""
        folder, delivered = self._folder, self._delivered
        return sum(
            _num_lines(log, offset)
            for log, offset in (
                (folder.metrics, delivered.metrics_offset),
                (folder.system, delivered.system_offset),
                (folder.statistics, delivered.statistics_offset),
            )
        )

    def report(self, history: History) -> None:
        """Renew the tags, the note and the files of the MLflow run."""
        client, run_id = self._open(history), self._run_id()
        _log_tags(client, run_id, tags(history))
        with TemporaryDirectory(prefix="elastic-report-") as name:
            write_files(history, self._folder, Path(name))
            client.log_artifacts(run_id, name)
            self._folder.files.write(TIMELINE, (Path(name) / TIMELINE).read_bytes())
        self._profiles(client, run_id)

    def end(self, history: History) -> None:
        """Close the run in the store with its outcome."""
        client, membership = self._open(history), history.membership
        _log_tags(client, self._run_id(), tags(history))
        delete_duplicate_runs(client, self._delivered)
        status = STATUS.get(membership.outcome or "", "KILLED")
        end_ms = int(membership.sessions[-1].end * 1000)
        client.set_terminated(self._run_id(), status, end_ms)
        self._has_ended = True

    def close(self) -> None:
        """Open the run again before the next delivery, since the store may have changed."""
        self._is_open = False

    def _open(self, history: History) -> MlflowClient:
        if self._client is None:
            self._client = connect(self._uri, self._folder)
        if not self._is_open:
            start_ms = int(history.membership.sessions[0].start * 1000)
            opened = open_run(self._client, self._folder, self._delivered, start_ms)
            run, self._known = opened
            self._start_ms = run.info.start_time
            if not self._has_ended and run.info.status != "RUNNING":
                self._client.update_run(run.info.run_id, status="RUNNING")
            self._settings(self._client, run)
            self._is_open = True
        return self._client

    def _run_id(self) -> str:
        assert self._delivered.run_id is not None
        return self._delivered.run_id

    def _settings(self, client: MlflowClient, run: Run) -> None:
        """Log missing params; values that a resume has changed become tags."""
        recipe = self._folder.recipe()
        if recipe is None:
            return
        wanted = params(recipe)
        known = run.data.params
        missing = [Param(name, value) for name, value in wanted.items() if name not in known]
        for first in range(0, len(missing), MAX_PARAMS_TAGS_PER_BATCH):
            batch = missing[first : first + MAX_PARAMS_TAGS_PER_BATCH]
            client.log_batch(run.info.run_id, params=batch)
        changed = {
            f"elastic.changed.{name}": value
            for name, value in wanted.items()
            if known.get(name, value) != value
        }
        _log_tags(client, run.info.run_id, changed)

    def _run_events(self, client: MlflowClient, history: History) -> None:
        membership = history.membership
        if membership.num_run_events > self._delivered.num_run_events:
            metrics = event_metrics(membership, self._delivered.num_run_events)
            _log_metrics(client, self._run_id(), metrics)
            self._advance("num_run_events", membership.num_run_events)

    def _readings(self, client: MlflowClient, history: History) -> None:
        account = history.account
        if account.num_readings > self._delivered.num_readings:
            readings = account.readings_from(self._delivered.num_readings)
            _log_metrics(client, self._run_id(), (m for r in readings for m in reading_metrics(r)))
            self._advance("num_readings", account.num_readings)

    def _profiles(self, client: MlflowClient, run_id: str) -> None:
        """Upload each trace once; a trace that exists is complete and does not change."""
        for name in sorted(self._folder.files.files(PROFILES)):
            if name in self._delivered.profiles or not name.endswith(TRACE):
                continue
            with TemporaryDirectory(prefix="elastic-profile-") as folder:
                copy = Path(folder) / Path(name).name
                copy.write_bytes(self._folder.files.read(name))
                client.log_artifact(run_id, str(copy), PROFILES)
            self._advance("profiles", [*self._delivered.profiles, name])

    def _blocks(
        self,
        client: MlflowClient,
        log: LineLog,
        offset_name: str,
        to_metrics: Callable[[Mapping[str, Any]], Iterable[Metric]],
        until: float,
    ) -> None:
        tail = Tail(log, getattr(self._delivered, offset_name))
        for rows in tail.blocks(BLOCK_BYTES):
            _log_metrics(client, self._run_id(), (m for row in rows for m in to_metrics(row)))
            self._advance(offset_name, tail.offset)
            if self._clock() >= until:
                return

    def _advance(self, name: str, value: object) -> None:
        setattr(self._delivered, name, value)
        self._delivered.save(self._folder.files)


def _log_metrics(client: MlflowClient, run_id: str, metrics: Iterable[Metric]) -> None:
    entities = list(metrics)
    for first in range(0, len(entities), MAX_METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=entities[first : first + MAX_METRICS_PER_BATCH])


def _log_tags(client: MlflowClient, run_id: str, values: Mapping[str, str]) -> None:
    entities = [RunTag(name, value) for name, value in values.items()]
    for first in range(0, len(entities), MAX_PARAMS_TAGS_PER_BATCH):
        client.log_batch(run_id, tags=entities[first : first + MAX_PARAMS_TAGS_PER_BATCH])


def _num_lines(log: LineLog, offset: int) -> int:
    return sum(block.count(b"\n") for block in log.blocks(offset))
