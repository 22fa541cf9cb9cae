"""A run's folder: the paths of its files, and readers that follow growing files."""

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
from pipelines.errors import UserError

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RESERVED = frozenset({"data", "sweeps", "mlflow.db", "mlruns", "mlartifacts"})
"""Other names in a storage folder: prepared data, sweeps and MLflow's files."""
RECIPE_FORMAT = 2
"""The format of `recipe.json`; settings of another format are refused."""
RECIPE, TRACKING, TIMELINE = "recipe.json", "tracking.json", "timeline.png"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`<storage>/<run name>/` on a disk or in an object store; docs/files.md lists its files."""

    files: Storage

    @classmethod
    def of(cls, storage: str | Path, run_name: str) -> RunFolder:
        """Raises `UserError` for an invalid storage or an invalid run name."""
        if not RUN_NAME.fullmatch(run_name):
            raise UserError(
                f"--run-name {run_name!r}: use letters, digits, '.', '_' and '-', and begin with a "
                "letter or digit"
            )
        if run_name.lower() in RESERVED:
            raise UserError(
                f"--run-name {run_name}: this name is reserved in the storage; choose another, "
                f"e.g. {run_name}-1"
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
        """The folder or URL that holds the runs."""
        if self.path:
            return str(self.path.parent)
        parts = urlsplit(self.url)
        return parts._replace(path=str(PurePosixPath(parts.path).parent)).geturl()

    @property
    def path(self) -> Path | None:
        """The path of a folder on a disk, else None."""
        return self.files.path if isinstance(self.files, DiskStorage) else None

    @property
    def journal(self) -> LineLog:
        return LineLog(self.files, "journal.jsonl")

    @property
    def metrics(self) -> LineLog:
        return LineLog(self.files, "metrics.jsonl")

    @property
    def system(self) -> LineLog:
        """One line per sample of a worker's device and host."""
        return LineLog(self.files, "system.jsonl")

    @property
    def history_logs(self) -> tuple[LineLog, LineLog, LineLog]:
        """What a run's history is read from: the journal, the metrics and the system samples."""
        return self.journal, self.metrics, self.system

    @property
    def statistics(self) -> LineLog:
        """One line per step with statistics of the model (`statistics_every`)."""
        return LineLog(self.files, STATISTICS)

    def recipe(self) -> dict[str, Any] | None:
        """The content of `recipe.json`; None before the run has begun."""
        return read_json(self.files, RECIPE)


def named_storage(storage: str | Path) -> Storage:
    """The storage that `--storage` names. Raises `UserError`."""
    if not str(storage):
        raise UserError("--storage is empty; give a folder, or a URL such as s3://bucket/folder")
    try:
        return open_storage(str(storage))
    except (ValueError, OSError) as error:
        raise UserError(
            f"--storage {without_credentials(str(storage))}: {error}; give a folder, or a URL such "
            "as s3://bucket/folder"
        ) from None


def find_run(name: str, storage: str | Path) -> RunFolder:
    """The folder of an existing run. Raises `UserError` if there is none."""
    folder = RunFolder.of(storage, name)
    try:
        if folder.files.size(RECIPE) is not None:
            return folder
        files = named_storage(storage)
        names = [name for name in files.folders() if files.at(name).size(RECIPE) is not None]
    except OSError as error:
        raise UserError(f"--storage {storage}: cannot be read ({error})") from None
    raise UserError(
        f"there is no run '{name}' in {storage}; its runs are: {', '.join(names) or 'none'} "
        "(use --storage for another folder)"
    )


def read_json(files: Storage, name: str) -> dict[str, Any] | None:
    """A JSON object; None if there is no file. Raises `UserError` if the file is damaged."""
    try:
        content = files.read(name)
    except FileNotFoundError:
        return None
    parsed = parse_line(content)
    if parsed is None:
        raise damaged_file(files, name)
    return parsed


def damaged_file(files: Storage, name: str, problem: str = "") -> UserError:
    """The error for a small file of a run that is damaged, or written by an incompatible version;
    `problem` describes it."""
    cause = f"cannot be used ({problem})" if problem else "is damaged"
    return UserError(
        f"{files.at(name).url} {cause}; `{repair_command(files)}` sets it aside and reports what "
        "is lost"
    )


def refuse_other_format(folder: RunFolder, recipe: dict[str, Any]) -> None:
    """Raises `UserError` if another version, with other settings, wrote this `recipe.json`."""
    written = recipe.get("format")
    if isinstance(written, int) and written != RECIPE_FORMAT:
        raise UserError(
            f"run '{folder.name}' in {folder.storage}: {RECIPE} has format {written}, this version "
            f"reads {RECIPE_FORMAT}: choose another --run-name (or use the version that wrote it)"
        )


def default_tracking_uri(storage: str | Path) -> str:
    """The default MLflow store: a SQLite file in the storage folder, or in the working folder if
    the storage is remote."""
    files = named_storage(storage)
    folder = files.path if isinstance(files, DiskStorage) else Path.cwd()
    return f"sqlite:///{folder / 'mlflow.db'}"


class Tail:
    """Follows a growing log of JSON lines.

    `offset` (bytes) is the end of the last line read; a Tail created with it continues there. A
    missing file and a last line without a newline count as not written yet. A complete line that
    is not a JSON object (its writer died) is skipped and counted.
    """

    def __init__(self, log: LineLog, offset: int = 0) -> None:
        self._reader = log.reader(offset)
        self.num_torn = 0

    @property
    def offset(self) -> int:
        return self._reader.offset

    def read(self, max_bytes: int = 1 << 20) -> list[dict[str, Any]]:
        """The next complete lines, about `max_bytes` of them; empty if nothing is new."""
        return self._parsed(self._reader.read(max_bytes))

    def blocks(self, max_bytes: int = 1 << 20) -> Iterator[list[dict[str, Any]]]:
        """All complete lines up to the present end of the file, in blocks."""
        yield from map(self._parsed, self._reader.blocks(max_bytes))

    def drain(self) -> Iterator[dict[str, Any]]:
        """All complete lines up to the present end of the file."""
        return chain.from_iterable(self.blocks())

    def _parsed(self, block: bytes) -> list[dict[str, Any]]:
        parsed = [parse_line(line) for line in block.split(b"\n")[:-1]]
        whole = [row for row in parsed if row is not None]
        self.num_torn += len(parsed) - len(whole)
        return whole
