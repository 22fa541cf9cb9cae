"""The result of a run as Ray Train's `Result`, or the exception that it raises."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas
from ray.train import Checkpoint, Result, TrainingFailedError

from actors.ray_backend.controller import DriverReport
from actors.storage.checkpoint_files import find_checkpoints, folder_of
from actors.storage.errors import ControllerLost
from pipelines.api.tables import Tables
from pipelines.errors import UserError
from pipelines.observe.history.run_folder import RunFolder
from pipelines.settings.user_code import short_traceback

NAMES = {
    "workers": "ScalingConfig(num_workers)",
    "run-name": "RunConfig(name)",
    "storage": "RunConfig(storage_path)",
    "audit-every": "audit_every",
    "callback": "callbacks",
    "record-samples": "record_samples",
    "tracking-uri": "tracking_uri",
} | {name: name for name in ("layout", "steps", "data", "set", "inject", "interface", "ports")}
"""The argument of the API for each option of the command line."""


@contextmanager
def in_terms_of_python() -> Iterator[None]:
    """Errors name the arguments of the API instead of command-line options."""
    try:
        yield
    except UserError as error:
        error.args = (renamed(error.args[0]), *error.args[1:])
        raise error.with_traceback(None) from None
    except ControllerLost as error:
        raise TrainingFailedError(
            f"the controller died ({error}); use the same RunConfig(name) to resume the run"
        ) from None


def renamed(message: str) -> str:
    """`--run-name x` as `RunConfig(name) x`."""

    def argument(option: re.Match[str]) -> str:
        return NAMES.get(option[1], option[0])

    return re.sub(r"(?<![\w-])--([a-z][a-z-]+)", argument, message)


class RunResult(Result):  # type: ignore[misc]
    """The result of a run, as Ray Train's, with `failed_callbacks`: a line about each callback that
    raised."""

    failed_callbacks: tuple[str, ...] = ()


def ended(
    folder: RunFolder, progress: DriverReport, failed_callbacks: Sequence[str] = ()
) -> RunResult:
    """The result of a run that has completed or was stopped on request.

    Raises `TrainingFailedError` with the traceback of the user's code, or `UserError`.
    """
    outcome = progress.outcome
    assert outcome is not None
    for line in (*progress.undelivered, *failed_callbacks):
        warnings.warn(line, stacklevel=2)
    message = f"run '{folder.name}' failed at step {outcome.step}: {outcome.reason}"
    if outcome.outcome == "user_error":
        raise UserError(renamed(outcome.reason))
    if outcome.outcome == "failed":
        traceback = short_traceback(outcome.traceback)
        raise TrainingFailedError("\n".join(part for part in (message, traceback) if part))
    result = result_of(folder)
    result.failed_callbacks = tuple(failed_callbacks)
    return result


def result_of(folder: RunFolder) -> RunResult:
    """The result from a run's folder; `best_checkpoints` are all kept checkpoints with the metrics
    of their steps."""
    table = Tables(folder).metrics()
    system, path = folder.files.in_arrow()
    kept = []
    for saved in find_checkpoints(folder.files).whole:
        place = folder.files.at(folder_of(saved.step, saved.generation)).in_arrow()[1]
        kept.append((Checkpoint(place, system), _metrics(table, saved.step)))
    return RunResult(
        metrics=_metrics(table),
        checkpoint=kept[-1][0] if kept else None,
        error=None,
        path=path,
        metrics_dataframe=table,
        best_checkpoints=kept,
        _storage_filesystem=system,
    )


def _metrics(table: pandas.DataFrame, step: int | None = None) -> dict[str, Any]:
    """The metrics of a step, by default of the last one; empty if there is no such step."""
    rows = table if step is None or table.empty else table[table["step"] == step]
    return {} if rows.empty else dict(rows.to_dict("records")[-1])
