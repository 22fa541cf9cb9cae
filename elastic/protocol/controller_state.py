"""The controller's whole state: what replaying the journal brings back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from elastic.geometry.training_job import Job
from elastic.protocol.duty_records import Duty
from elastic.protocol.duty_state import (
    AuditDuty,
    CheckpointDuty,
    ErrorDuty,
    FormingDuty,
    GangDuty,
    GrowthDuty,
    LayoutDuty,
    LiveDuty,
    LossDuty,
    MarketDuty,
    MembershipDuty,
    PoisonDuty,
    QuarantineDuty,
    RollbackDuty,
    SnapshotDuty,
    StepDuty,
    StoreDuty,
    StragglerDuty,
)
from elastic.protocol.phases import Ended, Ending, Phase, Waiting, may_follow
from elastic.protocol.policy import Policy, unopened


@dataclass(slots=True)
class ControllerState:
    """Everything that the controller decides from: the run itself, and one part for each duty."""

    policy: Policy = field(default_factory=unopened)
    job: Job = field(default_factory=Job)
    incarnation: int = 0
    generation: int = 0
    lineage: int = 0
    """The generation of the last rollback."""
    phase: Phase = field(default_factory=lambda: Waiting("not opened", 0.0))
    ending: Ending | None = None
    committed_step: int = 0
    evaluated_step: int = 0

    layouts: LayoutDuty = field(default_factory=LayoutDuty)
    steps: StepDuty = field(default_factory=StepDuty)
    forming: FormingDuty = field(default_factory=FormingDuty)
    live: LiveDuty = field(default_factory=LiveDuty)
    store: StoreDuty = field(default_factory=StoreDuty)
    membership: MembershipDuty = field(default_factory=MembershipDuty)
    growth: GrowthDuty = field(default_factory=GrowthDuty)
    gang: GangDuty = field(default_factory=GangDuty)
    market: MarketDuty = field(default_factory=MarketDuty)
    quarantine: QuarantineDuty = field(default_factory=QuarantineDuty)
    stragglers: StragglerDuty = field(default_factory=StragglerDuty)
    poison: PoisonDuty = field(default_factory=PoisonDuty)
    snapshots: SnapshotDuty = field(default_factory=SnapshotDuty)
    checkpoints: CheckpointDuty = field(default_factory=CheckpointDuty)
    losses: LossDuty = field(default_factory=LossDuty)
    audits: AuditDuty = field(default_factory=AuditDuty)
    rollbacks: RollbackDuty = field(default_factory=RollbackDuty)
    errors: ErrorDuty = field(default_factory=ErrorDuty)

    def duties(self) -> Iterator[Duty]:
        """The state of each duty."""
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, Duty):
                yield value

    @property
    def has_failed(self) -> bool:
        """Whether the run has ended with an error, maybe behind its last step."""
        return isinstance(self.phase, Ended) and self.phase.outcome != "completed"

    def enter(self, phase: Phase) -> None:
        """Change the phase; the table of transitions must allow it."""
        assert may_follow(self.phase, phase), f"{self.phase} may not lead to {phase}"
        self.phase = phase

    def commit(self, step: int) -> None:
        """One more step has committed: other holdings are of the step before."""
        self.committed_step = step
        self.live.also_held = []
        self.forming.num_attempts = 0

    def roll_back(self, step: int) -> None:
        """Go back to a step in a new lineage: everything after it is void."""
        self.lineage = self.generation
        self.committed_step = step
        self.evaluated_step = min(self.evaluated_step, step)
        for duty in self.duties():
            duty.roll_back(step)

    def shift_clock(self, seconds: float) -> None:
        """Move every duty's times by a period in which the controller was away."""
        for duty in self.duties():
            duty.shift_clock(seconds)
