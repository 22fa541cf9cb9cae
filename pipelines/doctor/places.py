"""What a run reads and writes: its storage, its data, its tracking server; and their clocks."""

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
from pipelines.observe.history.formatting import counted, duration, quantity
from pipelines.observe.history.run_folder import default_tracking_uri, named_storage
from pipelines.settings.errors import UserError

PROBE_BYTES = 16 * 10**6
PATIENCE_S = 5.0


def storage(named: str) -> Iterator[Finding]:
    """Write a file of 16 MB, read it and remove it; what the storage's clock says of it."""
    there = named_storage(named)
    if isinstance(there, DiskStorage):
        there = DiskStorage(nearest(there.path))  # to leave no new folder behind
        yield free_disk(there.path)
    name, data = f".elastic-doctor-{uuid.uuid4().hex}", os.urandom(PROBE_BYTES)
    try:
        began = time.time()
        there.write(name, data)
        written = time.time()
        is_same = there.read(name) == data
        read = time.time()
        modified = there.modified(name)
    except OSError as error:
        told = without_credentials(str(error).splitlines()[0])
        mend = "name one that can be written by --storage; credentials come from the environment"
        yield Finding("storage", f"{there.url}: {told}", "failed", mend)
        return
    finally:
        _remove(there, name)
    yield storage_speed(there.url, is_same, written - began, read - written)
    if modified is not None:
        yield clock("the storage", modified, (began, written))


def storage_speed(
    url: str, is_same: bool, write_s: float, read_s: float, bounds: Bounds = BOUNDS
) -> Finding:
    if not is_same:
        mend = "this storage loses or changes what is written: use another"
        return Finding("storage", f"{url}: another file was read than written", "failed", mend)
    speeds = [PROBE_BYTES / max(seconds, 1e-9) for seconds in (write_s, read_s)]
    value = f"{url}: writes {quantity(speeds[0])}B/s, reads {quantity(speeds[1])}B/s"
    if min(speeds) >= bounds.storage_bytes_per_s:
        return Finding("storage", value)
    mend = "checkpoints will take long: save more rarely (checkpoint_every), or use another"
    return Finding("storage", value, "warning", mend)


def clock(
    whose: str, told: float, between: tuple[float, float], bounds: Bounds = BOUNDS
) -> Finding:
    """What another clock told, between two moments of this one; both in seconds since the epoch.

    A second is forgiven: some tell whole ones only.
    """
    first, last = between
    ahead = max(0.0, told - last) or min(0.0, told + 1.0 - first)
    what = f"clock of {whose}"
    if abs(ahead) < 0.005:
        return Finding(what, "as this one")
    value = f"{duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this one"
    if abs(ahead) <= bounds.clock_skew_s:
        return Finding(what, value)
    return Finding(what, value, "warning", "set both by NTP: `chronyc makestep`; leases rest on it")


def tracking(named: str | None, storage: str) -> Iterator[Finding]:
    """Whether the MLflow store answers, its version, and its clock."""
    uri = named or default_tracking_uri(storage)
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        yield from _server(uri)
    elif scheme == "sqlite":
        yield database(uri, Path(uri.removeprefix("sqlite:///")))
    else:
        yield Finding("tracking", f"{without_credentials(uri)}: not looked at")


def _server(uri: str) -> Iterator[Finding]:
    shown = without_credentials(uri)
    began = time.time()
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/version", timeout=PATIENCE_S) as answer:
            told, date = answer.read(100).decode(errors="replace").strip(), answer.headers["Date"]
        yield Finding("tracking", f"{shown}: MLflow {told}")
    except urllib.error.HTTPError as error:
        date = error.headers["Date"]
        if error.code not in (401, 403):
            mend = "is it an MLflow server? Look at --tracking-uri"
            yield Finding("tracking", f"{shown}: answers {error.code}", "failed", mend)
            return
        yield Finding("tracking", f"{shown}: answers, and tells its version to nobody unknown")
    except (OSError, ValueError) as error:
        mend = "start it, or name another by --tracking-uri; a run trains on without it"
        yield Finding("tracking", f"{shown}: {error}", "failed", mend)
        return
    if date:
        told_s = parsedate_to_datetime(date).timestamp()
        yield clock("the tracking server", told_s, (began, time.time()))


def database(uri: str, file: Path) -> Finding:
    """MLflow's store in a file of this machine."""
    if not file.exists():
        if os.access(nearest(file.parent), os.W_OK):
            return Finding("tracking", f"{uri}: will be made")
        return Finding("tracking", f"{uri}: cannot be made", "failed", "name one by --tracking-uri")
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as opened:
            [number] = opened.execute("select count(*) from runs").fetchone()
    except sqlite3.Error as error:
        mend = "it is no MLflow store: move it away, or name another by --tracking-uri"
        return Finding("tracking", f"{uri}: {error}", "failed", mend)
    return Finding("tracking", f"{uri}: {counted(number, 'run')}")


def data(source: str, storage: str) -> Finding:
    """What `--data` finds here."""
    name = source or "the Python standard library"
    try:
        found = find_data(source, named_storage(storage).at("data").url)
        if found.place is None:
            return Finding("data", "random tokens")
        if found.corpus is not None:
            there = "prepared" if found.is_there() else "to be prepared"
            return Finding("data", f"{name}: {counted(len(found.corpus.files), 'file')}, {there}")
        train = open_prepared(found.place).index.splits["train"]
        return Finding("data", f"{name}: {train.num_tokens:,} tokens to train on")
    except UserError as error:
        return Finding("data", str(error), "failed", "see docs/data.md")


def nearest(path: Path) -> Path:
    """The folder itself, or the first above it that is there."""
    return next(place for place in (path, *path.parents) if place.exists())


def _remove(there: Storage, name: str) -> None:
    try:
        there.remove(name)
    except OSError:
        return  # that it does not answer has been told
