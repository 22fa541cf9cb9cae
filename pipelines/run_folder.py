"""A run's folder: where its files lie, and how to follow those that grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pipelines.errors import UserError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`<storage>/<run name>/`, as DESIGN section 9 lays it out."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def storage(self) -> Path:
        return self.path.parent

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def system(self) -> Path:
        """One line a worker's sample of its device and host."""
        return self.path / "system.jsonl"

    @property
    def recipe(self) -> Path:
        """All settings of the run, as nested JSON."""
        return self.path / "recipe.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tracking(self) -> Path:
        """How far the run has been delivered to which tracking store."""
        return self.path / "tracking.json"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.png"


def find_run(name: str, storage: Path) -> RunFolder:
    """The folder of a run that has been begun; raises `UserError` if there is none."""
    folder = RunFolder(storage / name)
    if not folder.recipe.exists():
        there = sorted(path.parent.name for path in storage.glob("*/recipe.json"))
        raise UserError(
            f"there is no run '{name}' in {storage}; there are: {', '.join(there) or 'none'} "
            "(another folder: --storage)"
        )
    return folder


def default_tracking_uri(storage: Path) -> str:
    """The MLflow store of those who name none: a SQLite file inside the storage folder."""
    return f"sqlite:///{storage.resolve() / 'mlflow.db'}"


class Tail:
    """Follows a JSON Lines file that others append to.

    `offset` (bytes) is the end of the last line given out; a Tail made with it goes on there.
    A last line without its newline is not yet there, and neither is a missing file. A whole
    line that is no JSON object (its writer died half-way) is left out and counted.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.num_torn = 0

    def read(self, max_bytes: int = 1 << 20) -> list[dict[str, Any]]:
        """The next complete lines, about `max_bytes` of them; none if nothing has come."""
        block = self._whole_lines(max_bytes)
        self.offset += len(block)
        parsed = [_parse(line) for line in block.split(b"\n")[:-1]]
        whole = [row for row in parsed if row is not None]
        self.num_torn += len(parsed) - len(whole)
        return whole

    def blocks(self, max_bytes: int = 1 << 20) -> Iterator[list[dict[str, Any]]]:
        """All complete lines up to the end that the file has now, some at a time."""
        while True:
            before = self.offset
            rows = self.read(max_bytes)
            if self.offset == before:
                return
            yield rows

    def drain(self) -> Iterator[dict[str, Any]]:
        """All complete lines up to the end that the file has now."""
        return chain.from_iterable(self.blocks())

    def _whole_lines(self, size_bytes: int) -> bytes:
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            while True:
                file.seek(self.offset)
                block = file.read(size_bytes)
                end = block.rfind(b"\n") + 1
                if end or len(block) < size_bytes:
                    return block[:end]
                size_bytes *= 2


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
