"""Simulated storage: parts of checkpoints, and the checkpoints published from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sim.lineage import SPECS, Lineage, cut, places

from actors.storage.checkpoint_files import FoundCheckpoints
from elastic.geometry.regions import Region
from elastic.protocol.commands import DropCheckpoints, PublishCheckpoint, SetAside
from elastic.protocol.events import PartFile, Saved


class Written(NamedTuple):
    """What one worker has written: regions with their values."""

    lineage: Lineage
    tensors: dict[int, tuple[Region, list[int]]]

    def named(self, name: str) -> PartFile:
        """The description of the file that the worker reports."""
        num_bytes = 8 * sum(len(values) for _, values in self.tensors.values())
        return PartFile(name, num_bytes, checksum=sum(self.tensors))


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint: its whole tensors."""

    lineage: Lineage
    tensors: dict[int, list[int]]

    def read(self, tensor: int, region: Region) -> list[int]:
        return cut(self.tensors[tensor], Region.whole(SPECS[tensor].shape), region)


class Storage:
    """Outlives every worker and every controller."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], dict[str, Written]] = {}
        self.visible: dict[str, Checkpoint] = {}
        self.damaged: set[str] = set()
        self._saved: list[Saved] = []

    def write(self, step: int, generation: int, file: str, part: Written) -> None:
        self.parts.setdefault((step, generation), {})[file] = part

    def publish(self, command: PublishCheckpoint) -> Saved:
        """Raises OSError if a part differs from its report.

        Asserts that the checkpoint is whole (invariant 11): each element once, all of the same
        steps.
        """
        files = self.parts.get((command.step, command.generation), {})
        for file in command.files:
            if file.name not in files or files[file.name].named(file.name) != file:
                raise OSError(f"{file.name} is not there in its full size")
        parts = [files[file.name] for file in command.files]
        checkpoint = _whole(command.step, parts)
        path = f"step-{command.step}-g{command.generation}"
        for saved in self._saved:
            if saved.path == path:
                return saved  # a restarted controller publishes it again
        saved = Saved(command.step, command.generation, path)
        self.visible[path] = checkpoint
        self._saved.append(saved)
        return saved

    def drop(self, command: DropCheckpoints) -> None:
        for step, generation in command.dropped:
            self.parts.pop((step, generation), None)
            for saved in [s for s in self._saved if (s.step, s.generation) == (step, generation)]:
                self._saved.remove(saved)
                del self.visible[saved.path]

    def set_aside(self, command: SetAside) -> None:
        for saved in [s for s in self._saved if s.step == command.step]:
            if saved.generation == command.generation:
                self._saved.remove(saved)

    def whole(self) -> tuple[Saved, ...]:
        """The checkpoints that a new controller finds, the oldest first."""
        return tuple(sorted(self._saved, key=lambda saved: (saved.step, saved.generation)))


def find_checkpoints(storage: Storage) -> FoundCheckpoints:
    """What a new controller finds, as `actors.storage.checkpoint_files` does."""
    newest_generation = max((generation for _, generation in storage.parts), default=0)
    return FoundCheckpoints(storage.whole(), (), (), newest_generation=newest_generation)


def _whole(step: int, parts: list[Written]) -> Checkpoint:
    lineages = {part.lineage.generations for part in parts}
    assert len(lineages) == 1, f"invariant 11: parts of {len(lineages)} lineages"
    lineage = parts[0].lineage
    assert lineage.step == step, f"invariant 11: step {lineage.step} saved as {step}"
    tensors: dict[int, list[int]] = {}
    for index, spec in enumerate(SPECS):
        whole = Region.whole(spec.shape)
        filled: list[int | None] = [None] * whole.num_elements
        for part in parts:
            region, values = part.tensors.get(index, (Region.whole((0,)), []))
            for place, value in zip(places(whole, region) if values else (), values, strict=True):
                assert filled[place] is None, f"invariant 11: {spec.name} is written twice"
                filled[place] = value
        assert filled == lineage.values(index, whole), f"invariant 11: {spec.name} is not whole"
        tensors[index] = lineage.values(index, whole)
    return Checkpoint(lineage, tensors)
