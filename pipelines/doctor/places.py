"""Checks of a run's storage, data and tracking server, and of their clocks."""

from __future__ import annotations

import os
import sqlite3
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from actors.storage.credentials import without_credentials
from actors.storage.storage import DiskStorage, Storage
from pipelines.data.opening import find_data
from pipelines.data.prepared import open_prepared
from pipelines.doctor.finding import BOUNDS, Bounds, Finding
from pipelines.doctor.machine import free_disk
from pipelines.errors import UserError
from pipelines.observe.history.formatting import counted, duration, quantity
from pipelines.observe.history.run_folder import default_tracking_uri, named_storage

PROBE_BYTES = 16 * 10**6
PATIENCE_S = 5.0


def storage(named: str) -> Iterator[Finding]:
    """Write, read and remove a file of 16 MB; compare its modification time with this clock."""
    storage_ = named_storage(named)
    if isinstance(storage_, DiskStorage):
        storage_ = DiskStorage(nearest(storage_.path))  # to leave no new folder behind
        yield free_disk(storage_.path)
    name, data = f".elastic-doctor-{uuid.uuid4().hex}", os.urandom(PROBE_BYTES)
    try:
        began = time.time()
        storage_.write(name, data)
        written = time.time()
        is_same = storage_.read(name) == data
        read = time.time()
        modified = storage_.modified(name)
    except OSError as error:
        reason = without_credentials(str(error).splitlines()[0])
        fix = "give a writable --storage; credentials come from the environment"
        yield Finding("storage", f"{storage_.url}: {reason}", "failed", fix)
        return
    finally:
        _remove(storage_, name)
    yield storage_speed(storage_.url, is_same, written - began, read - written)
    if modified is not None:
        yield clock("the storage", modified, (began, written))


def storage_speed(
    url: str, is_same: bool, write_s: float, read_s: float, bounds: Bounds = BOUNDS
) -> Finding:
    if not is_same:
        fix = "this storage loses or corrupts files: use another one"
        return Finding("storage", f"{url}: the file differs from what was written", "failed", fix)
    speeds = [PROBE_BYTES / max(seconds, 1e-9) for seconds in (write_s, read_s)]
    value = f"{url}: writes {quantity(speeds[0])}B/s, reads {quantity(speeds[1])}B/s"
    if min(speeds) >= bounds.storage_bytes_per_s:
        return Finding("storage", value)
    fix = "checkpoints are slow: save less often (checkpoint.every), or use another storage"
    return Finding("storage", value, "warning", fix)


def clock(
    whose: str, reported: float, between: tuple[float, float], bounds: Bounds = BOUNDS
) -> Finding:
    """Compare another clock's time with two moments of this one; in seconds since the epoch.

    A second of lag is tolerated, since some clocks report whole seconds.
    """
    first, last = between
    ahead = max(0.0, reported - last) or min(0.0, reported + 1.0 - first)
    check = f"clock of {whose}"
    if abs(ahead) < 0.005:
        return Finding(check, "same as this machine")
    value = f"{duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this machine"
    if abs(ahead) <= bounds.clock_skew_s:
        return Finding(check, value)
    fix = "leases need synchronous clocks: use NTP on both sides, e.g. `chronyc makestep`"
    return Finding(check, value, "warning", fix)


def tracking(named: str | None, storage: str) -> Iterator[Finding]:
    """Whether the MLflow store answers, its version, and its clock."""
    uri = named or default_tracking_uri(storage)
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        yield from _server(uri)
    elif scheme == "sqlite":
        yield database(uri, Path(uri.removeprefix("sqlite:///")))
    else:
        yield Finding("tracking", f"{without_credentials(uri)}: not checked")


def _server(uri: str) -> Iterator[Finding]:
    shown = without_credentials(uri)
    began = time.time()
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/version", timeout=PATIENCE_S) as answer:
            version = answer.read(100).decode(errors="replace").strip()
            date = answer.headers["Date"]
        yield Finding("tracking", f"{shown}: MLflow {version}")
    except urllib.error.HTTPError as error:
        date = error.headers["Date"]
        if error.code not in (401, 403):
            fix = "check --tracking-uri: this may not be an MLflow server"
            yield Finding("tracking", f"{shown}: answers {error.code}", "failed", fix)
            return
        yield Finding("tracking", f"{shown}: answers; its version needs authentication")
    except (OSError, ValueError) as error:
        fix = "start it, or give another --tracking-uri; a run trains without it"
        yield Finding("tracking", f"{shown}: {error}", "failed", fix)
        return
    if date:
        server_s = parsedate_to_datetime(date).timestamp()
        yield clock("the tracking server", server_s, (began, time.time()))


def database(uri: str, file: Path) -> Finding:
    """MLflow's store in a file of this machine."""
    if not file.exists():
        if os.access(nearest(file.parent), os.W_OK):
            return Finding("tracking", f"{uri}: a run will create it")
        fix = "give a writable store with --tracking-uri"
        return Finding("tracking", f"{uri}: cannot be created", "failed", fix)
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as store:
            [num_runs] = store.execute("select count(*) from runs").fetchone()
    except sqlite3.Error as error:
        fix = "this is not an MLflow store: move the file away, or give another --tracking-uri"
        return Finding("tracking", f"{uri}: {error}", "failed", fix)
    return Finding("tracking", f"{uri}: {counted(num_runs, 'run')}")


def data(source: str, storage: str) -> Finding:
    """The data that `--data` finds on this machine."""
    name = source or "the Python standard library"
    try:
        found = find_data(source, named_storage(storage).at("data").url)
        if found.place is None:
            return Finding("data", "random tokens")
        if found.corpus is not None:
            state = "prepared" if found.is_there() else "to be prepared"
            return Finding("data", f"{name}: {counted(len(found.corpus.files), 'file')}, {state}")
        train = open_prepared(found.place).index.splits["train"]
        return Finding("data", f"{name}: {train.num_tokens:,} training tokens")
    except UserError as error:
        return Finding("data", str(error), "failed", "see docs/data.md")


def nearest(path: Path) -> Path:
    """The folder itself, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _remove(storage_: Storage, name: str) -> None:
    try:
        storage_.remove(name)
    except OSError:
        return  # the finding on the write has reported the problem
