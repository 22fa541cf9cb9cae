"""Where checkpoints lie, when one is whole, and how a worker writes its part aside training."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from actors.program import Program
from elastic.events import Event, PartFailed, PartWritten, Saved
from elastic.regions import Region

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


def folder_of(run_folder: Path, step: int, generation: int) -> Path:
    """A folder of its own for each try: a redone step never meets the files of the first."""
    return run_folder / "checkpoints" / f"step-{step:08d}-g{generation}"


def publish(run_folder: Path, step: int, generation: int, files: Iterable[tuple[str, int]]) -> Path:
    """Make a checkpoint visible by writing its manifest last (invariant 11).

    Raises OSError if a part is not there in its full size, or the disk refuses.
    """
    folder = folder_of(run_folder, step, generation)
    for name, num_bytes in files:
        found_bytes = (folder / name).stat().st_size
        if found_bytes != num_bytes:
            raise OSError(f"{folder / name} has {found_bytes} bytes, not {num_bytes}")
    manifest = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "generation": generation,
        "files": dict(files),
    }
    partial = folder / (MANIFEST + ".partial")
    with open(partial, "w") as out:
        json.dump(manifest, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, folder / MANIFEST)
    return folder


def newest_whole(
    run_folder: Path, stands: Callable[[int, int], bool] = lambda step, generation: True
) -> tuple[Saved | None, list[str]]:
    """The newest checkpoint whose parts are all there, and what is wrong with newer ones.

    `stands` says of a step and a generation whether their checkpoint counts.
    """
    candidates: list[tuple[int, int, Saved, dict[str, int]]] = []
    complaints: list[str] = []
    for path in sorted((run_folder / "checkpoints").glob(f"step-*/{MANIFEST}")):
        manifest = json.loads(path.read_text())
        saved = Saved(manifest["step"], manifest["generation"], str(path.parent))
        if not stands(saved.step, saved.generation):
            continue
        candidates.append((saved.step, saved.generation, saved, manifest["files"]))
    for *_, saved, files in sorted(candidates, key=lambda c: c[:2], reverse=True):
        damaged = [
            name
            for name, num_bytes in files.items()
            if not (Path(saved.path) / name).is_file()
            or (Path(saved.path) / name).stat().st_size != num_bytes
        ]
        if not damaged:
            return saved, complaints
        complaints.append(f"{saved.path}/{damaged[0]} is missing or cut short: skipped")
    return None, complaints


@dataclass(frozen=True)
class Part:
    """One worker's share of one checkpoint, already copied to host memory."""

    step: int
    generation: int
    tensors: dict[str, tuple[Region, Tensor]]


class PartWriter:
    """Writes parts in the background, one after the other."""

    def __init__(
        self, worker: str, run_folder: Path, program: Program, report: Callable[[Event], None]
    ) -> None:
        self._worker = worker
        self._run_folder = run_folder
        self._program = program
        self._report = report
        self._parts: queue.Queue[Part] = queue.Queue()
        threading.Thread(target=self._serve, name="part-writer", daemon=True).start()

    def write(self, part: Part) -> None:
        self._parts.put(part)

    def _serve(self) -> None:
        while True:
            part = self._parts.get()
            try:
                file = self._write(part)
            except OSError as error:
                self._report(PartFailed(self._worker, part.generation, part.step, str(error)))
            else:
                size = file.stat().st_size
                self._report(PartWritten(self._worker, part.generation, part.step, file.name, size))

    def _write(self, part: Part) -> Path:
        folder = folder_of(self._run_folder, part.step, part.generation)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"part-{self._worker}.safetensors"
        self._program.write_part(file, part.tensors)
        return file
