"""What each duty of the controller remembers: one dataclass a duty; only its owner writes it.

`ControllerState` calls `roll_back` and `shift_clock` over all duties, so a new duty cannot be
forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.topology import Place
from elastic.planner.checkpoint_interval import CheckpointCosts
from elastic.planner.models.measured_steps import MeasuredSteps
from elastic.protocol.duty_records import (
    CatchUp,
    Crash,
    Dealing,
    Drain,
    Duty,
    FormerTarget,
    HeldState,
    Quarantine,
    Rollback,
    SnapshotSet,
    Upload,
    UsualMachines,
    VoidedCheckpoints,
    WorkerRecord,
)
from elastic.protocol.events import Saved
from elastic.protocol.votes import Vote
from elastic.reshard.snapshot_placement import ParitySlot, Placement, Slot, SnapshotServer


@dataclass(slots=True)
class LayoutDuty(Duty):
    """Owner: `layout_requests`."""

    target: TargetLayout = field(default_factory=TargetLayout)
    former: FormerTarget | None = None
    """Only until a generation has formed under the new target, or would form another by it."""


@dataclass(slots=True)
class StepDuty(Duty):
    """Which steps were reported, and how fast they are. Owners: `running`, `catch_up`."""

    catch_up: CatchUp | None = None
    """While the controller lacks records of committed steps."""
    unheard: tuple[int, int] = (0, 0)
    """First and last step of which only the records were received, not the votes: their parts show
    which of them were saved."""
    last_vote: Vote | None = None  # the newest of this generation that any worker has read
    measured: MeasuredSteps = field(default_factory=MeasuredSteps)
    first_s: float = 0.0  # the longest first step of a generation, which may compile
    boundary_at: float = 0.0
    """When the members were last known to be at a step boundary. They pass others while the
    controller is away, so this time does not move."""
    stalled: tuple[str, ...] = ()  # training threads of this generation, the longest stall first

    def begin_generation(self) -> None:
        """A vote decides a step of its own generation only."""
        self.unheard, self.last_vote, self.stalled = (0, 0), None, ()


@dataclass(slots=True)
class PoisonDuty(Duty):
    """Owner: `poison_batches`."""

    fatal_step: int = 0
    """The step during which members were last lost."""
    fatal: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """For each lost member its generation and the microbatches that it ran."""
    is_fatal_evaluation: bool = False
    """Whether it was the evaluation before that step: the microbatches are held-out data."""
    guarded_step: int = 0
    """Members save the state before this step and wait until it is written; 0: none."""
    unguarded_step: int = 0
    """Before this step they waited in vain because a write hangs: the run goes on without it."""


@dataclass(slots=True)
class FormingDuty(Duty):
    """Owner: `forming`."""

    ever_formed: bool = False
    recent_form_s: list[float] = field(default_factory=list)
    """How long the latest formings took, also those that were aborted as late."""
    reshard_s: float = 0.0  # how long the latest forming and reshard took together
    sent_bytes_per_s: float = 0.0  # by a member in the latest live reshard; 0: not measured
    num_late_reshards: int = 0  # that exceeded their time limit since the latest measured one
    num_attempts: int = 0  # recoveries since the last committed step
    deferred: dict[str, int] = field(default_factory=dict)  # newcomers, by attempts that broke
    last_failure: str = ""


@dataclass(slots=True)
class StoreDuty(Duty):
    """Where the store listens. Owner: `core`."""

    host: str = ""
    port: int = 0


@dataclass(slots=True)
class LiveDuty(Duty):
    """The state that workers hold. Owners: `forming`, `aborting`."""

    held: HeldState | None = None
    also_held: list[HeldState] = field(default_factory=list)
    """The same step under other assignments, the newest first: the previous one until a step
    commits under the new one, and those that aborted reshards were moving to."""

    def holdings(self) -> list[HeldState]:
        """The live state under each assignment under which some of it lies."""
        return [*([self.held] if self.held else []), *self.also_held]

    def members(self) -> tuple[str, ...]:
        """The workers that train, or last did."""
        return self.held.assignment.members if self.held else ()


@dataclass(slots=True)
class MembershipDuty(Duty):
    """Which workers exist. Owners: `membership`, `drain`."""

    CLOCKS = ("no_start_before", "changes_at", "joined_at")

    records: dict[str, WorkerRecord] = field(default_factory=dict)
    warm: set[str] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)
    node_drains: dict[str, Drain] = field(default_factory=dict)  # by node
    next_worker: int = 0
    digest: str | None = None
    ever_ready: bool = False
    num_start_failures: int = 0
    no_start_before: float = 0.0
    recent_start_s: list[float] = field(default_factory=list)
    """How long the latest workers took from start to ready."""
    changes_at: list[float] = field(default_factory=list)
    """When members were last lost or drained."""
    joined_at: float = 0.0
    """When a worker last became ready to stay."""
    changed_generation: int = 0
    usual: UsualMachines = field(default_factory=UsualMachines)

    def shift_clock(self, seconds: float) -> None:
        """The ends of draining nodes do not move: no machine waits for the controller."""
        Duty.shift_clock(self, seconds)
        for record in self.records.values():
            record.since += seconds

    def num_staying(self) -> int:
        """Warm workers that are not draining."""
        return len(self.warm) - len(self.draining & self.warm)

    def staying(self) -> dict[str, Place]:
        """Where they run."""
        return {worker: self.records[worker].place for worker in sorted(self.warm - self.draining)}

    def on(self, node: str) -> set[str]:
        """Workers known to run on a node."""
        return {worker for worker, record in self.records.items() if record.node == node}

    def least_memory_bytes(self) -> int | None:
        """Device memory of the smallest worker that stays; None if unknown."""
        staying = self.warm - self.draining
        memories = [m for w in staying if (m := self.records[w].memory_bytes) is not None]
        return min(memories, default=None)


@dataclass(slots=True)
class QuarantineDuty(Duty):
    """Owner: `quarantine`."""

    CLOCKS = ("short_since", "until")

    crashes: list[Crash] = field(default_factory=list)  # the latest, the oldest first
    until: dict[str, float] = field(default_factory=dict)
    """By quarantined node, when its quarantine ends."""
    past: dict[str, Quarantine] = field(default_factory=dict)
    """By node, also of nodes that have been released."""
    short_since: float | None = None
    """Since when the run lacks workers while a node is quarantined."""

    def shift_clock(self, seconds: float) -> None:
        Duty.shift_clock(self, seconds)
        self.crashes = [crash.shifted(seconds) for crash in self.crashes]
        self.past = {node: past.shifted(seconds) for node, past in self.past.items()}


@dataclass(slots=True)
class StragglerDuty(Duty):
    """Owners: `stragglers`, `shares`."""

    timed: tuple[int, int] = (0, 0)
    """Generation and step of the latest report of compute times."""
    num_slow: dict[str, int] = field(default_factory=dict)
    """By straggler, in how many reports in a row it was one."""
    reported: set[str] = field(default_factory=set)
    num_replaced: int = 0
    dealing: Dealing = field(default_factory=Dealing)


@dataclass(slots=True)
class GrowthDuty(Duty):
    """Owner: `growth`."""

    CLOCKS = ("standby_since", "no_growth_before", "paused_at", "idle_since")

    standby_since: float | None = None
    """When the first of the joiners became ready that no decision has been made about."""
    no_growth_before: float = 0.0
    paused_at: float | None = None
    """The last progress before a planned pause, until a step commits after it."""
    pauses_s: list[float] = field(default_factory=list)
    """How long the latest pauses took."""
    idle_since: float | None = None
    """When standby workers were last seen or useful; None without standby workers."""
    num_given_back: int = 0
    """Standby workers given back as useless: that many fewer are wanted."""


@dataclass(slots=True)
class GangDuty(Duty):
    """Owner: `gang_backoff`."""

    CLOCKS = ("no_request_before",)

    num_backoffs: int = 0
    """Since workers last trained."""
    no_request_before: float = 0.0
    """No worker is requested before this time, since all were given back."""


@dataclass(slots=True)
class MarketDuty(Duty):
    """Owners: `market`, and `membership` for what is pending."""

    CLOCKS = ("pending", "short_until", "exchange_at")

    requested: str = ""
    """The market of the machines on which workers are requested now; empty: any machine."""
    pending: dict[str, float] = field(default_factory=dict)
    """By worker requested on a market that has no machine yet, since when."""
    extra: set[str] = field(default_factory=set)
    """Spot workers beyond the wanted number, each to be exchanged for an on-demand worker."""
    num_changes: int = 0  # of the market since a requested worker last got a machine
    num_refusals: int = 0  # of spot machines since a worker last got one
    short_until: float | None = None  # until then spot machines count as short
    exchange_at: float | None = None  # when to try to exchange on-demand workers
    spot_worker_s: float = 0.0  # how long the lost spot workers lived together
    num_spot_lost: int = 0
    has_warned: bool = False  # of missing labels
    opened_at: float = 0.0  # the run's first start
    is_behind: bool = False  # and needs on-demand machines to be done in time
    has_slack: bool = True
    num_withheld: int = 0  # missing workers that `market.max_price_per_hour` forbids
    speedup: tuple[Layout, float] | None = None  # of a step with all workers over this layout


@dataclass(slots=True)
class ErrorDuty(Duty):
    """Owner: `controller_errors`."""

    counts: dict[str, int] = field(default_factory=dict)
    """By place (class of an event or command, or name of a thread): unexpected exceptions of the
    controller in a row."""
    has_failed: bool = False
    """They end this session of the run."""


@dataclass(slots=True)
class SnapshotDuty(Duty):
    """Owner: `snapshots`."""

    CLOCKS = ("starting_since", "no_server_before", "queried_until", "placement_at")

    servers: dict[str, SnapshotServer] = field(default_factory=dict)  # by node
    starting_since: dict[str, float] = field(default_factory=dict)
    """By node, when the start of its server was ordered."""
    late_starts: set[str] = field(default_factory=set)
    """Nodes whose last server was not ready in time: placement does not wait for the next one."""
    sets: list[SnapshotSet] = field(default_factory=list)
    placement: Placement = field(default_factory=Placement)
    """Where the members send their snapshots."""
    num_set_changes: int = 0
    """How often the parity sets or `every` have changed in this generation."""
    every: int = 0
    """The steps between snapshots, if their cost has changed them; kept when a generation ends."""
    costs: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By worker, `share` and `num_steps` of its newest `SnapshotTimed`."""
    placement_at: float | None = None
    """When to compute the placement again, if at all."""
    wanted: set[str] | None = None
    """Nodes where this generation needs a snapshot server; None while unknown."""
    num_losses: int = 0
    no_server_before: float = 0.0
    are_queried: bool = False
    """Whether the servers have been queried since training stopped."""
    pending: set[str] = field(default_factory=set)
    """Nodes whose servers have not answered the query yet."""
    queried_until: float = 0.0
    are_late: bool = False
    """The controller waits for pending servers only if the others do not have enough."""
    slots: dict[str, tuple[Slot, ...]] = field(default_factory=dict)
    """What the servers reported, by node."""
    parities: dict[str, tuple[ParitySlot, ...]] = field(default_factory=dict)
    """The same for parity."""


@dataclass(slots=True)
class CheckpointDuty(Duty):
    """Owner: `checkpoints`, `uploads`."""

    CLOCKS = ("save_at",)

    saved: list[Saved] = field(default_factory=list)
    """Complete checkpoints, the oldest first."""
    uploads: dict[str, Upload] = field(default_factory=dict)
    stale: list[tuple[int, int]] = field(default_factory=list)
    """Step and generation of useless checkpoints in storage: voided, or never to be complete."""
    unfinished: dict[str, set[str]] = field(default_factory=dict)
    """By `upload_key`, of those never to be complete: the workers that may still write their part,
    after which the files are removed again."""
    voided: tuple[VoidedCheckpoints, ...] = ()
    held_out_losses: dict[str, float] = field(default_factory=dict)
    """By step, as far as needed to choose the best checkpoint."""
    save_at: float | None = None
    """When a checkpoint is due apart from multiples of steps."""
    is_save_requested: bool = False
    """Whether the members of this generation have received the request."""
    num_failures: int = 0
    late_writers: set[str] = field(default_factory=set)
    """Members that drain only because they write their part for too long."""
    costs: CheckpointCosts = field(default_factory=CheckpointCosts)

    def shift_clock(self, seconds: float) -> None:
        Duty.shift_clock(self, seconds)
        for upload in self.uploads.values():
            upload.since += seconds
            upload.deadline += seconds

    def want_save(self, now: float) -> None:
        """Request a checkpoint as soon as the members can receive the request."""
        self.save_at = now if self.save_at is None else min(now, self.save_at)

    def counts(self, step: int, generation: int) -> bool:
        """Whether a checkpoint counts: no rollback has voided its step."""
        return not any(step > void.step and generation < void.generation for void in self.voided)

    @property
    def saved_step(self) -> int:
        """Step of the newest complete checkpoint; 0, the initial state, if there is none."""
        return self.saved[-1].step if self.saved else 0


@dataclass(slots=True)
class LossDuty(Duty):
    """Owner: `loss_monitor`."""

    skipped_since: int | None = None
    """The first of the latest steps that were all skipped."""
    recent: list[tuple[int, float]] = field(default_factory=list)
    """The latest steps with a loss, and the loss; only while spikes are watched for."""
    spiked_step: int = 0
    """The latest step whose loss spiked although the run went on."""

    def roll_back(self, step: int) -> None:
        self.recent = [(at, loss) for at, loss in self.recent if at <= step]
        if self.skipped_since is not None and self.skipped_since > step:
            self.skipped_since = None


@dataclass(slots=True)
class AuditDuty(Duty):
    """Owner: `audit`."""

    audited_step: int = 0
    """All replicas were equal up to this step, or the run began from it."""
    differing_generation: int = 0  # in which replicas differed

    def roll_back(self, step: int) -> None:
        self.audited_step = min(self.audited_step, step)


@dataclass(slots=True)
class RollbackDuty(Duty):
    """Owner: `rollback`."""

    request: Rollback | None = None
    """Until a generation is formed from an older step."""
    from_step: int = 0
    number: int = 0
    """Rollbacks since the run last came clearly beyond the step that it was rolled back from."""
    skipped_batches: tuple[int, ...] = ()
    """Numbers of the batches that no step reads, ascending."""
