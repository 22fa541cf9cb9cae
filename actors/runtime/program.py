"""The seam to the training program: all that a worker knows of models, data and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from actors.storage.storage import Storage
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Coordinates, Layout
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from elastic.protocol.votes import Vote

__all__ = ["Groups", "Program", "Replica"]

Interrupt = Callable[[], None]
"""Raises if the generation is being aborted; a program calls it at least once a layer."""


@dataclass(frozen=True)
class Groups:
    """The process groups of one generation, as one rank sees them."""

    assignment: Assignment
    world_rank: int
    device: torch.device
    world: ProcessGroup
    mesh: DeviceMesh
    """Axes `replica` and `fsdp`, around them `pp` and `tp` if they have a degree; see
    `actors.distributed.meshes`."""
    cp: ProcessGroup | None = None
    """Those that share this rank's sequences by `cp`; None if it has them alone."""
    sequence: ProcessGroup | None = None
    """Those that share them by `cp` or `tp`, where there are experts."""
    experts: DeviceMesh | None = None
    """Axes `replica`, `fsdp` and `ep`, before them `pp`, for expert tensors where they see
    another mesh than the dense."""

    @property
    def layout(self) -> Layout:
        return self.assignment.layout

    @property
    def place(self) -> Coordinates:
        return self.layout.coordinates(self.world_rank)


@dataclass(frozen=True)
class StateBytes:
    """What a replica holds on its device, read from torch's storages."""

    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True)
class Applied:
    """What apply has to tell of a step."""

    lr: float
    """Not finite only if the schedule gave such a value, and the step is skipped."""
    grad_norm: float | None
    skipped: bool


@dataclass(frozen=True)
class WrittenPart:
    """A file of a checkpoint as it now lies in storage; `checksum` is of its header, which has
    `header_bytes`."""

    num_bytes: int
    checksum: int
    header_bytes: int


@dataclass(frozen=True)
class Evaluation:
    """What the held-out split gives: the mean loss, and further metrics by name.

    The loss is None if the evaluation counted nothing; values may be infinite or NaN.
    """

    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Replica(Protocol):
    """One rank's part of the model and optimizer under one assignment.

    Between `build` and `adopt` it has shapes but no values (meta device).
    """

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take these as the local state, one for each tensor that this rank holds, uncopied
        where the program can. Each has the shape of the rank's region in the shard map."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The local state by logical name, sharing memory with what is trained."""

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> torch.Tensor:
        """Forward, backward and gradient reduction for this rank's microbatches of a step.

        No step reads the batches with the numbers in `skipped_batches`.

        Returns float64 `(loss sum, token count, squared norm of the local gradients, each
        divided by its number of copies)`, shape (3,), on the device. When the host has read a
        value that depends on it, the reduced gradients are complete.
        """

    def apply(self, step: int, vote: Vote) -> Applied:
        """Scale by 1/tokens, clip, step the optimizer: local, without any collective."""

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that nobody has seen the vote of."""

    def evaluate(self, step: int, interrupt: Interrupt) -> Evaluation:
        """The held-out split's loss and metrics: the same values under any layout."""

    def state_bytes(self) -> StateBytes: ...

    def statistics(self) -> Mapping[str, Mapping[str, float | None]] | None:
        """By part of the model, and by name, numbers of the step just applied; None if it is to be
        told of none. All ranks call it, and the same ones have collectives in it."""


class Program(Protocol):
    """One training job as a worker process sees it; made once a process from JSON settings."""

    device: torch.device
    steps: int
    """The run is complete when this step has committed."""
    eval_every: int
    """Evaluate after each so many steps; 0 is never."""

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every logical tensor of the state, in a fixed order, whatever the layout."""

    def warm_up(self) -> None:
        """One throw-away build and step without groups, so that the first real ones are quick."""

    def build(self, groups: Groups) -> Replica: ...

    def initial(self, spec: TensorSpec, region: Region, interrupt: Interrupt) -> torch.Tensor:
        """A region of a tensor at step 0: a function of (seed, name) alone, on the device.

        `interrupt` is called at least each second while a large one is drawn.
        """

    def write_part(
        self, checkpoint: Storage, name: str, parts: Mapping[str, tuple[Region, torch.Tensor]]
    ) -> WrittenPart:
        """Write one worker's regions of a checkpoint to one file (host tensors). Raises OSError."""

    def read_regions(
        self, checkpoint: Storage, wanted: Mapping[str, Region]
    ) -> dict[str, torch.Tensor]:
        """Read regions from a whole checkpoint, whatever layout wrote it (host tensors).

        Raises `DamagedCheckpoint` if it is not what was written, OSError if the storage refuses.
        """
