"""The `Program` protocol: the interface through which a worker uses models, data and files."""

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
"""Raises if the generation is being aborted. A program calls it at least once a layer."""


@dataclass(frozen=True)
class Groups:
    """The process groups of one generation, as one rank sees them."""

    assignment: Assignment
    world_rank: int
    device: torch.device
    world: ProcessGroup
    mesh: DeviceMesh
    """Axes `replica` and `fsdp`, around them `pp` and `tp` if their degree exceeds 1; see
    `actors.distributed.meshes`."""
    cp: ProcessGroup | None = None
    """The ranks that share this rank's sequences along `cp`; None if cp=1."""
    sequence: ProcessGroup | None = None
    """The ranks that share them along `cp` or `tp`; only for models with experts."""
    experts: DeviceMesh | None = None
    """Axes `replica`, `fsdp` and `ep`, before them `pp`: the mesh of expert tensors, if it differs
    from that of dense tensors."""

    @property
    def layout(self) -> Layout:
        return self.assignment.layout

    @property
    def place(self) -> Coordinates:
        return self.layout.coordinates(self.world_rank)


@dataclass(frozen=True)
class StateBytes:
    """A replica's memory on its device, read from torch's storages."""

    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True)
class Applied:
    """The outcome of applying a step."""

    lr: float
    """Not finite only if the schedule returned such a value; then the step is skipped."""
    grad_norm: float | None
    skipped: bool


@dataclass(frozen=True)
class Waits:
    """The seconds for which `Replica.compute` has waited in this process so far."""

    data_s: float = 0.0
    """For data, or while it read them on the training thread."""
    data_asleep_s: float = 0.0
    """The part of it without use of a processor."""
    reduction_s: float = 0.0
    """The device for gradient reductions after the last backward; only measured on a GPU."""


@dataclass(frozen=True)
class DeviceFigures:
    """What the speed of a worker's device is compared with; None: not known."""

    name: str = ""
    step_flops: float | None = None
    """The floating-point operations of a whole step, on all workers together."""
    peak_flops: float | None = None
    """The most that the device can do a second in the run's data type."""


@dataclass(frozen=True)
class WrittenPart:
    """A file of a checkpoint in storage; `checksum` covers its header of `header_bytes`."""

    num_bytes: int
    checksum: int
    header_bytes: int


@dataclass(frozen=True)
class Evaluation:
    """Results on the held-out split: the mean loss, and further metrics by name.

    The loss is None if the evaluation counted no tokens; values may be infinite or NaN.
    """

    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Replica(Protocol):
    """One rank's part of the model and optimizer under one assignment.

    Between `build` and `adopt` it has shapes but no values (meta device).
    """

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use these tensors as the local state, one for each tensor that this rank holds, without
        a copy if possible. Each has the shape of the rank's region in the shard map."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The local state by logical name, sharing memory with the trained tensors."""

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: Sequence[int] = ()
    ) -> torch.Tensor:
        """Forward, backward and gradient reduction for this rank's microbatches of a step.

        No step reads the batches numbered in `skipped_batches`.

        Returns float64 `(loss sum, token count, squared norm of the local gradients, each
        divided by its number of copies)`, shape (3,), on the device. When the host has read a
        value that depends on it, the reduced gradients are complete.
        """

    def read_early(self) -> None:
        """Read what the next step needs first: called while the vote on a step is under way."""

    def apply(self, step: int, vote: Vote) -> Applied:
        """Scale by 1/tokens, clip, step the optimizer: local, without a collective."""

    def resume(self, committed_step: int, interrupt: Interrupt) -> None:
        """Begin to train after a step, on all ranks together, before the first `compute`."""

    def finish(self, interrupt: Interrupt) -> None:
        """Run what follows the last step, on all ranks together; again if a rank is lost in it."""

    @property
    def is_done(self) -> bool:
        """Whether the program ends the run with the step just applied, before its last."""

    def between_steps(self, interrupt: Interrupt | None) -> Mapping[str, float | None]:
        """Run what lies between the step just applied and the next, on all ranks together; returns
        numbers to be logged with that step, the same on all ranks.

        It may change the state. `interrupt` is None if the groups are broken: then it runs what
        needs no other rank.
        """

    def drop_gradients(self) -> None:
        """Drop the gradients of a step whose vote no worker has seen."""

    def evaluate(self, step: int, interrupt: Interrupt) -> Evaluation:
        """The held-out split's loss and metrics: the same values under any layout."""

    def state_bytes(self) -> StateBytes: ...

    def statistics(self) -> Mapping[str, Mapping[str, float | None]] | None:
        """Statistics of the step just applied, by part of the model and by name; None if disabled.

        All ranks call it. Either all ranks of a group run collectives in it, or none.
        """


class Program(Protocol):
    """One training job as a worker process sees it; created once a process from JSON settings."""

    device: torch.device
    steps: int
    """The run is complete when this step has committed."""
    eval_every: int
    """Evaluate every so many steps; 0 for never."""

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every logical tensor of the state, in a fixed order, whatever the layout."""

    @property
    def waits(self) -> Waits:
        """What this process' training has waited for."""

    @property
    def figures(self) -> DeviceFigures:
        """The speed of this process' device; called after `warm_up`."""

    def warm_up(self) -> None:
        """Build and run one throw-away step without groups, so that the first real step is fast."""

    def build(self, groups: Groups) -> Replica: ...

    def initial(self, spec: TensorSpec, region: Region, interrupt: Interrupt) -> torch.Tensor:
        """A region of a tensor at step 0: a function of (seed, name) alone, on the device.

        `interrupt` is called at least every second while a large tensor is drawn.
        """

    def write_part(
        self, checkpoint: Storage, name: str, parts: Mapping[str, tuple[Region, torch.Tensor]]
    ) -> WrittenPart:
        """Write one worker's regions (host tensors) to one checkpoint file. Raises OSError."""

    def read_regions(
        self, checkpoint: Storage, wanted: Mapping[str, Region]
    ) -> dict[str, torch.Tensor]:
        """Read regions (host tensors) from a complete checkpoint, written under any layout.

        Raises `DamagedCheckpoint` if a file is damaged, OSError if storage fails.
        """
