"""Simulated storage: parts of checkpoints, and what has been made visible of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sim.lineage import SPECS, Lineage, cut, places

from elastic.commands import PublishCheckpoint
from elastic.events import Saved
from elastic.regions import Region


class PartFile(NamedTuple):
    """What one worker has written: regions with their values."""

    lineage: Lineage
    tensors: dict[int, tuple[Region, list[int]]]

    @property
    def num_bytes(self) -> int:
        return 8 * sum(len(values) for _, values in self.tensors.values())


@dataclass(frozen=True)
class Checkpoint:
    """A whole one: its tensors, undivided."""

    lineage: Lineage
    tensors: dict[int, list[int]]

    def read(self, tensor: int, region: Region) -> list[int]:
        return cut(self.tensors[tensor], Region.whole(SPECS[tensor].shape), region)


class Storage:
    """Outlives every worker and every controller."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], dict[str, PartFile]] = {}
        self.visible: dict[str, Checkpoint] = {}
        self._saved: list[Saved] = []

    def write(self, step: int, generation: int, file: str, part: PartFile) -> None:
        self.parts.setdefault((step, generation), {})[file] = part

    def publish(self, command: PublishCheckpoint) -> Saved:
        """Raises OSError if a part is not there in the size that was told.

        Asserts that it is whole (invariant 11): each element once, all of the same steps.
        """
        files = self.parts.get((command.step, command.generation), {})
        for name, num_bytes in command.files:
            if name not in files or files[name].num_bytes != num_bytes:
                raise OSError(f"{name} is not there in its full size")
        parts = [files[name] for name, _ in command.files]
        checkpoint = _whole(command.step, parts)
        path = f"step-{command.step}-g{command.generation}"
        saved = Saved(command.step, command.generation, path)
        self.visible[path] = checkpoint
        self._saved.append(saved)
        return saved

    def newest(self, stands: Callable[[int, int], bool]) -> Saved | None:
        """What a controller that begins anew finds, of what counts."""
        found = [saved for saved in self._saved if stands(saved.step, saved.generation)]
        return max(found, key=lambda saved: (saved.step, saved.generation), default=None)


def _whole(step: int, parts: list[PartFile]) -> Checkpoint:
    lineages = {part.lineage.generations for part in parts}
    assert len(lineages) == 1, f"invariant 11: parts of {len(lineages)} histories"
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
