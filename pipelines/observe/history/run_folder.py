"""A run's folder: where its files lie, and how to follow those that grow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from actors.controller.run_opening import repair_command
from actors.storage.credentials import without_credentials
from actors.storage.file_names import STATISTICS
from actors.storage.line_logs import LineLog, parse_line
from actors.storage.storage import DiskStorage, Storage, open_storage
from pipelines.settings.errors import UserError

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RESERVED = frozenset({"data", "sweeps", "mlflow.db", "mlruns", "mlartifacts"})
"""What lies beside the runs in a storage: prepared data, sweeps, MLflow's own."""
RECIPE, TRACKING, TIMELINE = "recipe.json", "tracking.json", "timeline.png"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`<storage>/<run name>/`, as DESIGN section 9 lays it out, on a disk or an object store."""

    files: Storage

    @classmethod
    def of(cls, storage: str | Path, run_name: str) -> RunFolder:
        """Raises `UserError` for a storage that cannot be, and a name that would leave it."""
        if not RUN_NAME.fullmatch(run_name):
            raise UserError(
                f"--run-name {run_name!r}: use letters, digits, '.', '_' and '-', beginning with a "
                "letter or digit"
            )
        if run_name.lower() in RESERVED:
            raise UserError(
                f"--run-name {run_name}: the storage keeps other things under that name; choose "
                f"another, e.g. {run_name}-1"
            )
        return cls(named_storage(storage).at(run_name))

    @property
    def name(self) -> str:
        return self.path.name if self.path else Path(urlsplit(self.url).path).name

    @property
    def url(self) -> str:
        return self.files.url

    @property
    def storage(self) -> str:
        """The folder, or URL, that holds runs."""
        if self.path:
            return str(self.path.parent)
        parts = urlsplit(self.url)
        return parts._replace(path=str(PurePosixPath(parts.path).parent)).geturl()

    @property
    def path(self) -> Path | None:
        """If it lies on a disk."""
        return self.files.path if isinstance(self.files, DiskStorage) else None

    @property
    def journal(self) -> LineLog:
        return LineLog(self.files, "journal.jsonl")

    @property
    def metrics(self) -> LineLog:
        return LineLog(self.files, "metrics.jsonl")

    @property
    def system(self) -> LineLog:
        """One line a worker's sample of its device and host."""
        return LineLog(self.files, "system.jsonl")

    @property
    def statistics(self) -> LineLog:
        """One line a step of which the numbers inside the model were asked for."""
        return LineLog(self.files, STATISTICS)

    def recipe(self) -> dict[str, Any] | None:
        """All settings of the run, as nested JSON; None before it has begun."""
        return read_json(self.files, RECIPE)


def named_storage(storage: str | Path) -> Storage:
    """What `--storage` names. Raises `UserError`."""
    if not str(storage):
        raise UserError(
            "--storage: it is empty; name a folder, or a URL such as s3://bucket/folder"
        )
    try:
        return open_storage(str(storage))
    except (ValueError, OSError) as error:
        raise UserError(
            f"--storage {without_credentials(str(storage))}: {error}; name a folder, or a URL such "
            "as s3://bucket/folder"
        ) from None


def find_run(name: str, storage: str | Path) -> RunFolder:
    """The folder of a run that has been begun; raises `UserError` if there is none."""
    folder = RunFolder.of(storage, name)
    try:
        if folder.files.size(RECIPE) is not None:
            return folder
        place = named_storage(storage)
        there = [name for name in place.folders() if place.at(name).size(RECIPE) is not None]
    except OSError as error:
        raise UserError(f"--storage {storage}: cannot be read ({error})") from None
    raise UserError(
        f"there is no run '{name}' in {storage}; there are: {', '.join(there) or 'none'} "
        "(another folder: --storage)"
    )


def read_json(files: Storage, name: str) -> dict[str, Any] | None:
    """A JSON object; None if it is not there. Raises `UserError` if the file is damaged."""
    try:
        content = files.read(name)
    except FileNotFoundError:
        return None
    told = parse_line(content)
    if told is None:
        raise damaged_file(files, name)
    return told


def damaged_file(files: Storage, name: str, problem: str = "") -> UserError:
    """For a small file of a run that holds something else than was written, or what only another
    version reads; `problem` says what."""
    cause = f"cannot be used ({problem})" if problem else "is damaged"
    return UserError(
        f"{files.at(name).url} {cause}; `{repair_command(files)}` sets it aside, "
        "and says what is lost with it"
    )


def default_tracking_uri(storage: str | Path) -> str:
    """The MLflow store of those who name none: a SQLite file inside the storage folder, or, if
    that is none of this machine, here."""
    place = named_storage(storage)
    folder = place.path if isinstance(place, DiskStorage) else Path.cwd()
    return f"sqlite:///{folder / 'mlflow.db'}"


class Tail:
    """Follows a log of JSON lines that others append to.

    `offset` (bytes) is the end of the last line given out; a Tail made with it goes on there.
    A last line without its newline is not yet there, and neither is a missing file. A whole
    line that is no JSON object (its writer died half-way) is left out and counted.
    """

    def __init__(self, log: LineLog, offset: int = 0) -> None:
        self._reader = log.reader(offset)
        self.num_torn = 0

    @property
    def offset(self) -> int:
        return self._reader.offset

    def read(self, max_bytes: int = 1 << 20) -> list[dict[str, Any]]:
        """The next complete lines, about `max_bytes` of them; none if nothing has come."""
        return self._parsed(self._reader.read(max_bytes))

    def blocks(self, max_bytes: int = 1 << 20) -> Iterator[list[dict[str, Any]]]:
        """All complete lines up to the end that the file has now, some at a time."""
        yield from map(self._parsed, self._reader.blocks(max_bytes))

    def drain(self) -> Iterator[dict[str, Any]]:
        """All complete lines up to the end that the file has now."""
        return chain.from_iterable(self.blocks())

    def _parsed(self, block: bytes) -> list[dict[str, Any]]:
        parsed = [parse_line(line) for line in block.split(b"\n")[:-1]]
        whole = [row for row in parsed if row is not None]
        self.num_torn += len(parsed) - len(whole)
        return whole
