"""The training thread's actions, one for each command of the controller. Runs without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from torch import Tensor

from actors.distributed.bandwidth import measure_bandwidths
from actors.distributed.exchange import Moved
from actors.distributed.groups import Formation
from actors.distributed.state_transfer import TensorPieces, move, stage
from actors.host_memory.host_copy import clone_buffers
from actors.runtime.code_digest import digest_of_program
from actors.runtime.compute_time import compute_times
from actors.runtime.faults import FaultInjector
from actors.runtime.interruption import Interruption
from actors.runtime.program import Program, Replica, StateBytes
from actors.snapshots.memory_layout import read_snapshot
from actors.snapshots.worker_snapshots import Snapshots
from actors.storage.errors import StepMismatch
from actors.storage.storage import open_storage
from actors.worker.audit import Audit
from actors.worker.evaluation import evaluated
from actors.worker.holding import NOTHING_HELD, WorkerHolding, holding_of
from actors.worker.part_writer import CheckpointPart, PartWriter
from actors.worker.profiling import Profiling
from actors.worker.statistics_log import StatisticsLog
from actors.worker.step_protocol import KeptRecords, Stepper, quiesced
from actors.worker.step_timer import StepTimer
from actors.worker.worker_options import WorkerOptions
from elastic.geometry.assignment import Assignment
from elastic.geometry.regions import Region
from elastic.geometry.shard_map import region_of
from elastic.protocol.commands import (
    Abort,
    Form,
    Reshard,
    Resume,
    RollForward,
    SaveCheckpoint,
    SendRecords,
)
from elastic.protocol.events import (
    ComputeTimed,
    Event,
    GroupFormed,
    Paused,
    RolledForward,
    StateReady,
    StepCommitted,
)
from elastic.protocol.step_records import RecordsSent
from elastic.reshard.checkpoint_shards import tensors_to_write
from elastic.reshard.reshard_plan import ReshardPlan
from elastic.reshard.transfers import Transfers, derive

READ_AGAIN_S = 1.0
"""The pause before a failed read of a checkpoint is repeated."""


@dataclass
class Trainer:
    """State and actions of the one thread that touches torch.distributed and the model.

    `holdings` maps a generation to this worker's part of the state. It has the newest assignment's
    part. Until the first commit it also has the previous one, to recover from after a failure.
    """

    worker: str
    node: str
    program: Program
    options: WorkerOptions
    report: Callable[[Event], None]
    interruption: Interruption
    formation: Formation | None = None
    replica: Replica | None = None
    stepper: Stepper | None = None
    holdings: dict[int, WorkerHolding] = field(default_factory=dict)
    held_step: int = NOTHING_HELD
    records: KeptRecords = field(default_factory=KeptRecords)
    known_step: int = 0
    """The newest step whose record the controller had at the latest abort."""

    def __post_init__(self) -> None:
        self.faults = FaultInjector(self.worker, self.options.faults)
        self.specs = self.program.specs()
        source = (self.worker, self.node, self.specs, self.options.snapshot_every, self.faults)
        self.snapshots = Snapshots(*source, secret=self.options.secret, report=self.report)
        run = open_storage(self.options.run_folder)
        self.statistics = StatisticsLog(run)
        self.writer = PartWriter(self.worker, run, self.program, self.faults, self.report)
        self.profiling = Profiling(run, self.worker, self.options.profiled)
        self._shard = lru_cache(maxsize=1)(self._find_shard)
        self.digest = digest_of_program(self.specs)

    def form(self, order: Form) -> None:
        """Leave the old generation, form the groups of the new one, build the program without
        values. Raises `StepMismatch` if the plan expects a state that this worker does not hold."""
        self.order = order
        self.leave_generation()
        is_holder = self.worker in order.plan.holders
        held = order.plan.old if is_holder else None
        if held:
            holding_of(self.holdings, self.held_step, held.generation, order.plan.step)
        self.records.go_on_from(order.plan.step, is_holder)
        self.holdings = {g: h for g, h in self.holdings.items() if held and g == held.generation}
        self.formation = Formation(
            self.worker,
            order,
            self.program.device,
            self.options.collective_timeout_s,
            has_experts=any(spec.ep_dim is not None for spec in self.specs),
            secret=self.options.secret,
        )
        self.interruption.check()
        self.faults.at("forming", order.plan.step + 1)
        self.formation.form(self.interruption.abandonable)
        self.interruption.check()
        if self.formation.groups is not None:
            self.replica = self.program.build(self.formation.groups)
        self.report(GroupFormed(self.worker, order.generation))

    def reshard(self, command: Reshard) -> None:
        """Bring this worker's part of the state into place; acknowledge it by `StateReady`."""
        began = time.perf_counter()
        plan, assignment = self.order.plan, self.order.assignment
        self.faults.at("resharding", plan.step + 1)
        with self.interruption.abandonable():
            tensors, moved, needed = self._fetch(command)
        held = StateBytes(0, 0, 0)
        if self.replica is not None and self.formation and self.formation.groups:
            self.replica.adopt(tensors)
            self.holdings[assignment.generation] = WorkerHolding(assignment, self.replica.tensors())
            self.stepper = Stepper(
                self.formation.groups,
                self.replica,
                plan.step,
                self.interruption,
                self.faults,
                self.snapshots,
                self.writer,
                compute_times(self.options.straggler_every, self.program.device),
                self.records,
                StepTimer(self.program.device, lambda: self.program.waits),
            )
            held = self.replica.state_bytes()
        self.report(
            StateReady(
                self.worker,
                command.generation,
                moved.bytes_received,
                needed,
                time.perf_counter() - began,
                held.param_bytes,
                held.grad_bytes,
                held.optimizer_bytes,
                self._bandwidths(command),
            )
        )

    def train(self, resume: Resume) -> None:
        """Step until the run is complete, the workers agree on a pause, or an abort comes."""
        if self.worker in resume.released:
            self.forget_state()
            return
        with self.profiling.generation(resume.generation):
            self._train(resume)

    def _train(self, resume: Resume) -> None:
        assert self.stepper and self.replica and self.formation and self.formation.groups
        stepper, world_rank = self.stepper, self.formation.groups.world_rank
        stepper.resume(resume.skipped_batches)
        audit = Audit(self.formation.groups, self.specs, self.options.audit_every)
        evaluated_step = resume.evaluated_step
        self.writer.begun_step = min(self.writer.begun_step, resume.step)
        while True:
            if self._evaluation_is_due(stepper.committed_step, evaluated_step):
                evaluated_step = stepper.committed_step
                self._evaluate(resume.generation, evaluated_step, world_rank)
            if stepper.committed_step >= self.program.steps or self.replica.is_done:
                break
            if stepper.committed_step + 1 == resume.guarded_step:
                self._save_before_guarded_step(resume.generation, stepper.committed_step)
            with self.profiling.step(stepper.committed_step + 1):
                record, vote = stepper.step()
            self._keep_only(resume.generation)
            held = self.holdings[resume.generation]
            with stepper.timer.part("snapshot_s"):
                self.snapshots.begin(record.step, held.assignment, held.tensors)
            if world_rank == 0:
                self.report(StepCommitted(resume.generation, record, vote))
                if stepper.compute_s:
                    self.report(ComputeTimed(resume.generation, record.step, stepper.compute_s))
            with self.interruption.abandonable():
                self.statistics.log_step(self.replica, record, world_rank)
            if not self._audit(audit, record.step, held.tensors):
                break  # a state in doubt is neither trained on nor saved
            if vote.saves(self.options.checkpoint_every):
                self._save(resume.generation, record.step, held, None)
            if vote.num_pause_requests and record.step < self.program.steps:
                break  # not after the last step: no later generation would evaluate it
        with self.interruption.abandonable():
            self.snapshots.await_whole(self.interruption.check)
        is_last = stepper.finish(self.program.steps)
        self.report(Paused(self.worker, resume.generation, stepper.committed_step, is_last))

    def roll_forward(self, command: RollForward) -> None:
        """Roll forward to the step that a seen vote has decided.

        If the apply breaks, report `Quiesced` before the error: the controller waits for it.
        Raises `StepMismatch` if the vote is not of the step after this worker's.
        """
        assert self.stepper is not None
        try:
            self.faults.at("rolling_forward", command.vote.step)
            record = self.stepper.apply(command.vote)
        except StepMismatch:  # nothing was applied: the state is unchanged
            raise
        except BaseException:
            self.stepper.torn = True
            self._report_quiesced(command.generation)
            raise
        self.stepper.between_steps(are_groups_whole=False)
        self._keep_only(max(self.holdings))
        self.report(RolledForward(self.worker, command.generation, record))

    def save(self, command: SaveCheckpoint) -> None:
        """Write this worker's part of the state that the controller expects it to hold. Raises
        `StepMismatch` if it holds another."""
        held_step = self.stepper.committed_step if self.stepper else self.held_step
        holding = holding_of(self.holdings, held_step, command.held_generation, command.step)
        self._save(command.generation, command.step, holding, command.workers)

    def quiesce(self, command: Abort) -> None:
        """Report the step that this worker committed, and the records that the controller lacks."""
        self.known_step = command.committed_step
        self._report_quiesced(command.generation)

    def _report_quiesced(self, generation: int) -> None:
        at = self.held_step, self.records.for_report(self.known_step), self.writer.begun_step
        self.report(quiesced(self.worker, generation, self.stepper, *at))

    def send_records(self, command: SendRecords) -> None:
        """Answer at once on the control thread, while the training thread trains on."""
        records = self.records.after(command.committed_step)
        # Read after the records, so that every record's vote is known.
        vote = stepper.vote if (stepper := self.stepper) else None
        self.report(RecordsSent(self.worker, command.generation, records, vote))

    def leave_generation(self) -> None:
        """Drop model, optimizer and groups; keep the tensors of the holdings."""
        self.snapshots.end_generation()
        self.statistics.close()
        if self.stepper is not None:
            self.held_step = self.stepper.committed_step
        self.replica = self.stepper = None
        if self.formation is not None:
            self.formation.dissolve()
            self.formation = None

    def forget_state(self) -> None:
        self.leave_generation()
        self.holdings.clear()
        self.held_step = NOTHING_HELD

    def _fetch(self, command: Reshard) -> tuple[dict[str, Tensor], Moved, int]:
        """Return the new local tensors, what moved for them, and how many bytes were missing."""
        plan, assignment = self.order.plan, self.order.assignment
        if command.source in ("live", "snapshot"):
            assert plan.old is not None and self.formation is not None
            transfers = derive(self.specs, plan, self.worker)
            tensors, moved = move(
                self.specs,
                transfers,
                self._parts(plan, plan.old, transfers),
                self.formation.transfer,
                self.program.device,
                self.interruption.check,
            )
            return tensors, moved, moved.bytes_received
        regions = self._regions(assignment)
        if command.source == "initial":
            return self._draw(regions), Moved(), 0
        read = self._read(command.path, regions)
        placed = {name: tensor.to(self.program.device) for name, tensor in read.items()}
        num_bytes = sum(tensor.nbytes for tensor in placed.values())
        return placed, Moved(bytes_received=num_bytes), num_bytes

    def _draw(self, regions: dict[str, Region]) -> dict[str, Tensor]:
        by_name, check, drawn = {s.name: s for s in self.specs}, self.interruption.check, {}
        for name, region in regions.items():
            check()
            drawn[name] = self.program.initial(by_name[name], region, check)
        return drawn

    def _read(self, path: str, regions: dict[str, Region]) -> dict[str, Tensor]:
        """Read regions of a checkpoint. If storage refuses, repeat until the controller's deadline
        for this worker aborts the generation. Raises `DamagedCheckpoint`."""
        while True:
            try:
                return self.program.read_regions(open_storage(path), regions)
            except OSError:
                time.sleep(READ_AGAIN_S)
            self.interruption.check()

    def _bandwidths(self, command: Reshard) -> tuple[tuple[str, float], ...]:
        """The bandwidths from other workers to this one, measured where no state moves."""
        is_moving = command.source in ("live", "snapshot")
        if is_moving or self.formation is None or self.formation.transfer is None:
            return ()
        participants = self.order.plan.participants
        with self.interruption.abandonable():
            group, check = self.formation.transfer, self.interruption.check
            speeds = measure_bandwidths(group, self.program.device, check, self.faults.link_factor)
        return tuple((participants[peer], speed) for peer, speed in speeds)

    def _parts(self, plan: ReshardPlan, old: Assignment, transfers: Transfers) -> TensorPieces:
        """This worker's parts of the old assignment, where the transfers can read them."""
        parts: dict[int, Mapping[str, Tensor]] = {}
        if transfers.own_part is not None:
            held = self.holdings[old.generation]
            if self.program.device.type == "cuda":
                held.tensors = stage(self.specs, transfers, held.tensors)
            parts[transfers.own_part] = held.tensors
        servers = {server.node: server for server in self.order.snapshot_servers}
        for part in plan.carried:
            if part.carrier == self.worker:
                parts[old.world_rank(part.member)] = read_snapshot(
                    part,
                    servers,
                    self.node,
                    self.specs,
                    old,
                    plan.step,
                    self.options.secret,
                )
        return parts

    def _regions(self, assignment: Assignment) -> dict[str, Region]:
        if self.worker not in assignment.members:
            return {}
        coordinates = assignment.coordinates(self.worker)
        regions = ((s.name, region_of(s, assignment.layout, coordinates)) for s in self.specs)
        return {name: region for name, region in regions if region is not None}

    def _evaluation_is_due(self, step: int, evaluated_step: int) -> bool:
        every = self.program.eval_every
        return bool(every) and step > evaluated_step and step % every == 0

    def _evaluate(self, generation: int, step: int, world_rank: int) -> None:
        assert self.replica is not None
        self.faults.at("evaluation", step)
        with self.interruption.abandonable():
            evaluation = self.replica.evaluate(step, self.interruption.check)
        if world_rank == 0:
            self.report(evaluated(generation, step, evaluation))

    def _audit(self, audit: Audit, step: int, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether all replicas are equal. If not, every rank reports it, since a broken one
        may die."""
        if not audit.is_due(step):
            return True
        with self.interruption.abandonable():
            audited = audit.compare(step, tensors, self.interruption.check)
        if audited.splits or audit.groups.world_rank == 0:
            self.report(audited)
        return not audited.splits

    def _save(
        self, generation: int, step: int, holding: WorkerHolding, writers: tuple[str, ...] | None
    ) -> None:
        """Hand this worker's checkpoint shard to the writer, which copies it before the next
        apply."""
        assignment = holding.assignment
        shard = self._shard(assignment, writers or assignment.members)
        still = clone_buffers(self.specs, {name: holding.tensors[name] for name in shard})
        tensors = {name: (shard[name], tensor) for name, tensor in still.items()}
        self.writer.begin(CheckpointPart(step, generation, tensors))

    def _save_before_guarded_step(self, generation: int, step: int) -> None:
        """Make the committed state durable: the next step has ended workers before."""
        if (self.writer.begun_step, self.writer.begun_generation) != (step, generation):
            self._save(generation, step, self.holdings[generation], None)
        with self.interruption.abandonable():
            self.writer.await_written(self.interruption.check)

    def _find_shard(self, assignment: Assignment, writers: tuple[str, ...]) -> dict[str, Region]:
        """The regions that this worker writes of a checkpoint."""
        regions = self._regions(assignment)
        indices = tensors_to_write(self.specs, assignment, writers, self.worker)
        return {name: regions[name] for name in (self.specs[index].name for index in indices)}

    def _keep_only(self, generation: int) -> None:
        """Drop the older holdings, which the first commit under a generation makes stale."""
        if len(self.holdings) > 1:
            self.holdings = {generation: self.holdings[generation]}
