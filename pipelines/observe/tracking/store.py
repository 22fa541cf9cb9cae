"""Access to an MLflow store: bounded requests, and one MLflow run per run name."""

from __future__ import annotations

import getpass
import logging
import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.telemetry import set_telemetry_client
from mlflow.utils.mlflow_tags import MLFLOW_SOURCE_NAME, MLFLOW_USER

from pipelines.observe.history.run_folder import RunFolder, default_tracking_uri
from pipelines.observe.tracking.delivered import Delivered

KEY_TAG = "elastic.run"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Without it MLflow's page guesses, and may show the runs as evaluations of language models."""
ENVIRONMENT = {
    # A request blocks for at most 10 s, and the tracker retries from the run's files.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def prepare_process() -> None:
    """Bound and silence MLflow's client in this process; variables set by the user stay."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    set_telemetry_client()
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def connect(uri: str, folder: RunFolder) -> MlflowClient:
    """A client of the store; the default store is created if it does not exist."""
    storage = _storage_of(uri, folder)
    if storage is not None:
        _ensure_database(storage)
    return MlflowClient(uri)


def open_run(
    client: MlflowClient, folder: RunFolder, delivered: Delivered, start_ms: int
) -> tuple[Run, Delivered]:
    """Find the run of this folder in the store, or create it.

    `CreateRun` is not safe to retry. So the key is stored before the first try, and every try
    searches for it first. A deleted run gets a successor.
    """
    run = None
    if delivered.run_id is None:
        delivered.save(folder.files)
    else:
        run = _active_run(client, delivered.run_id)
        delivered = delivered if run else delivered.successor()
    if run is None:
        run = _find_run(client, delivered) or _create_run(client, folder, delivered, start_ms)
        delivered.run_id = run.info.run_id
        delivered.save(folder.files)
    return run, delivered


def delete_duplicate_runs(client: MlflowClient, delivered: Delivered) -> None:
    """Delete empty duplicates, which a `CreateRun` with a lost answer may have left."""
    for run in _runs_of_key(client, delivered):
        if run.info.run_id != delivered.run_id and not run.data.metrics:
            client.delete_run(run.info.run_id)


def _active_run(client: MlflowClient, run_id: str) -> Run | None:
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return None
        raise
    return run if run.info.lifecycle_stage == LifecycleStage.ACTIVE else None


def _runs_of_key(client: MlflowClient, delivered: Delivered) -> list[Run]:
    experiment = client.get_experiment_by_name(delivered.experiment)
    if experiment is None:
        return []
    wanted = f"tags.`{KEY_TAG}` = '{delivered.key}'"
    return list(client.search_runs([experiment.experiment_id], wanted))


def _find_run(client: MlflowClient, delivered: Delivered) -> Run | None:
    return next(iter(_runs_of_key(client, delivered)), None)


def _create_run(
    client: MlflowClient, folder: RunFolder, delivered: Delivered, start_ms: int
) -> Run:
    tags = {
        KEY_TAG: delivered.key,
        MLFLOW_SOURCE_NAME: "elastic train",
        MLFLOW_USER: _user(),
    }
    experiment_id = _experiment_id(client, folder, delivered)
    return client.create_run(experiment_id, start_ms, tags, run_name=folder.name)


def _experiment_id(client: MlflowClient, folder: RunFolder, delivered: Delivered) -> str:
    experiment = client.get_experiment_by_name(delivered.experiment)
    if experiment is not None:
        return str(experiment.experiment_id)
    storage = _storage_of(delivered.uri, folder)
    artifacts = (storage / "mlflow-artifacts").as_uri() if storage is not None else None
    return str(client.create_experiment(delivered.experiment, artifacts, EXPERIMENT_TAGS))


def _storage_of(uri: str, folder: RunFolder) -> Path | None:
    """The storage folder whose default store this URI is: a parent of the run's folder, or the
    working folder."""
    storages = folder.path.resolve().parents if folder.path else (Path.cwd(),)
    return next((path for path in storages if default_tracking_uri(path) == uri), None)


def _ensure_database(storage: Path) -> None:
    """Create the SQLite store under another name, then link it into place.

    A process that is killed while MLflow creates its tables leaves a file that no process can
    open. Linking a complete file prevents that.
    """
    database = storage / "mlflow.db"
    if database.exists():
        return
    draft = storage / f".mlflow-{uuid4().hex}.db"
    try:
        MlflowClient(f"sqlite:///{draft.resolve()}").search_experiments(max_results=1)
        with suppress(FileExistsError):  # another run of this storage was faster
            database.hardlink_to(draft)
    finally:
        draft.unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
