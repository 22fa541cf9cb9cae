"""`Duty`, and records that duties keep: workers, drains, crashes, uploads and others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from elastic.geometry.assignment import Assignment
from elastic.geometry.machine_report import MachineReport
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.topology import Place
from elastic.protocol.events import PartFile


@dataclass(slots=True)
class Duty:
    """State of one duty. `roll_back` forgets what happened after a step, and `shift_clock` moves
    times by the controller's absence."""

    CLOCKS: ClassVar[tuple[str, ...]] = ()
    """The fields that hold a time, times in a list or by name, or None."""

    def roll_back(self, step: int) -> None:
        """Forget what happened after `step`."""

    def shift_clock(self, seconds: float) -> None:
        """Move all times by a period in which the controller was away."""
        for name in self.CLOCKS:
            value = getattr(self, name)
            if isinstance(value, list):
                setattr(self, name, [time + seconds for time in value])
            elif isinstance(value, dict):
                setattr(self, name, {key: time + seconds for key, time in value.items()})
            elif value is not None:
                setattr(self, name, value + seconds)


@dataclass(slots=True)
class WorkerRecord:
    """One worker; `MembershipDuty` has the sets of warm and draining workers."""

    since: float
    """When it was started, or, once it is ready, when it became ready."""
    node: str = ""
    rack: str = ""
    pid: int = 0
    memory_bytes: int | None = None
    device: str = "cpu"
    machine: MachineReport = field(default_factory=MachineReport)
    quarantined: tuple[str, ...] = ()
    """The nodes that were quarantined when it was started."""
    market: str = ""
    """The market of its machine, as it was requested or as the machine's label says."""
    is_ready: bool = False
    has_broken_device: bool = False
    silent_in: int = 0
    """The latest generation in which it did not answer."""

    @property
    def place(self) -> Place:
        return Place(self.node, self.rack)


@dataclass(slots=True)
class Dealing:
    """How many microbatches each data rank is to compute, by its speed.

    The generation after `generation` deals by `shares` if it has the same members; empty: evenly.
    """

    generation: int = 0
    shares: tuple[int, ...] = ()
    num_better: int = 0
    """In how many reports of compute times in a row other shares would make steps shorter."""
    num_reports: int = 0
    """Since the shares last changed; not counted before their first change."""
    num_changes: int = 0
    """Without a long time between them."""
    planned: dict[str, float] = field(default_factory=dict)
    """The ratio of each straggler for which the shares were planned."""
    excess: dict[str, float] = field(default_factory=dict)
    """By straggler, how many times too high its ratio is with a smaller share, because not all of
    its compute time depends on the share."""
    step_s: float = 0.0
    """The median time of a step with even shares, before they were changed; 0: not known."""


@dataclass(slots=True)
class Drain:
    """A node that will be gone at `deadline`, and the workers that drain only for that reason."""

    deadline: float
    draining_workers: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Crash:
    """An unplanned end of a worker's process on a node, at `time`.

    `step` is the step that the worker was computing, 0 if it was not training. It had been started
    or ready `since`.
    """

    time: float
    since: float
    node: str
    step: int = 0
    is_excused: bool = False
    """Whether it does not count against its node by itself: see `quarantine`."""

    def shifted(self, seconds: float) -> Crash:
        """The crash on a clock that was moved."""
        return replace(self, time=self.time + seconds, since=self.since + seconds)


@dataclass(frozen=True, slots=True)
class Quarantine:
    """How often a node has been quarantined recently, since when, and whether for a failed check
    rather than for crashes."""

    number: int
    since: float
    is_unfit: bool = False

    def shifted(self, seconds: float) -> Quarantine:
        """The quarantine on a clock that was moved."""
        return replace(self, since=self.since + seconds)


@dataclass(slots=True)
class UsualMachines:
    """What new workers' devices are compared with, as of the last generation; empty before the
    first."""

    product_s: dict[str, float] = field(default_factory=dict)
    """By kind of processor, the median time of a matrix product."""
    worker_by_device: dict[str, str] = field(default_factory=dict)
    num_unfit: int = 0
    """How many unfit workers came since the last fit one."""


@dataclass(slots=True)
class HeldState:
    """The live state: its assignment, and the workers that still hold their part of it."""

    assignment: Assignment
    holders: set[str]


@dataclass(slots=True)
class SnapshotSet:
    """The valid snapshots of one assignment, up to a step of the current lineage."""

    assignment: Assignment
    newest_step: int | None = None
    """None while steps are still committed under the assignment."""
    is_used: bool = False
    """Whether the members have been ordered to take any."""
    was_whole: bool = False
    """Whether a vote has said that all of them are complete."""


@dataclass(slots=True)
class CatchUp:
    """The controller lacks the records of committed steps up to `target` and has requested them
    from a worker."""

    target: int
    worker: str = ""
    deadline: float = 0.0
    tried: tuple[str, ...] = ()
    """Workers that did not answer in time, or had none of the records."""


@dataclass(slots=True)
class Upload:
    """A checkpoint whose parts are still being written."""

    step: int
    generation: int
    pending: set[str]
    assignment: Assignment
    """The assignment of the state that is written."""
    since: float = 0.0
    deadline: float = 0.0
    """When the missing parts count as late: see `CheckpointDuty.late_writers`."""
    files: dict[str, PartFile] = field(default_factory=dict)
    written_s: float = 0.0
    """How long the newest of the written parts took."""
    num_files_when_late: int = 0
    """How many were written when the others last counted as late."""
    is_published: bool = False


@dataclass(frozen=True, slots=True)
class FormerTarget:
    """The target layout before `request`; it is restored if the request proves impossible."""

    target_layout: TargetLayout
    request: str


@dataclass(frozen=True, slots=True)
class Rollback:
    """An ordered rollback to a step up to `limit`.

    The run then skips the batches of the steps after it up to `through` (0: none).
    """

    limit: int
    cause: str
    through: int = 0
    is_state_in_doubt: bool = False
    """A run that ends instead does not save its state: it may be corrupt."""


@dataclass(frozen=True, slots=True)
class VoidedCheckpoints:
    """Checkpoints of steps after `step` that generations before `generation` wrote are void."""

    step: int
    generation: int
