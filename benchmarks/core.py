"""Benchmark of the controller's core with 10,000 workers, and of the transfers of a 405 B model.

The workers are simulated, and transfers are derived for one worker. All code is Python without
waits, so processor time is measured, and other load on the machine does not count.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from report import Must, conclude, parser, show_table

from elastic.controller.core import Core
from elastic.geometry.assignment import Assignment
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.tensor_specs import TensorSpec
from elastic.geometry.topology import Place
from elastic.geometry.training_job import Bandwidths, Job
from elastic.planner.proposal import Proposal, assign, propose
from elastic.protocol.commands import Abort, Command, Form, Reshard, Resume
from elastic.protocol.events import (
    Event,
    GroupFormed,
    Quiesced,
    RunOpened,
    StateReady,
    StepCommitted,
    StoreReady,
    WorkerLost,
    WorkerReady,
)
from elastic.protocol.votes import StepRecord, Vote
from elastic.reshard.reshard_plan import ReshardPlan
from elastic.reshard.transfers import Transfers, derive
from pipelines.run.options import policy_of
from pipelines.settings import (
    CheckpointSettings,
    FailureSettings,
    SnapshotSettings,
    StragglerSettings,
    TrainSettings,
)

NUM_WORKERS = 10_000
NUM_STEPS = 10_000
NUM_LOSSES = 5
WORKERS_PER_NODE = 8
NODES_PER_RACK = 16
NUM_LAYERS = 126
LAYER_COSTS = (1,) * NUM_LAYERS
ALL_AXES = "pp=16,dp=4,fsdp=16,cp=2,tp=8"
CHANGES = (
    ("pp=16,dp=1,fsdp=128,tp=8", "pp=16,dp=1,fsdp=127,tp=8"),
    ("dp=16,fsdp=128,tp=8", "dp=23,fsdp=89,tp=8"),
    ("dp=1,fsdp=2048,tp=8", "dp=1,fsdp=2047,tp=8"),
    (ALL_AXES, ALL_AXES),
    (ALL_AXES, "pp=15,dp=4,fsdp=17,cp=2,tp=8"),
)
"""Target layouts for 16,384 and for 16,376 workers.

The first is that of Llama 3. The next two use every worker and move almost every byte. Then all
five axes, which need a new plan, and the same with one stage less, so that no worker keeps its
place."""
JOB = Job(
    num_microbatches=2_048,
    state_bytes=12 * 405 * 10**9,
    param_bytes=4 * 405 * 10**9,
    layer_costs=LAYER_COSTS,
    activation_bytes=2 * 8_192 * 16_384,
    microbatch_s=50.0,
    bandwidths=Bandwidths(node=200e9, rack=50e9, far=25e9),
)
"""A step of 16 million tokens in sequences of 8,192; the bandwidths are rough guesses."""
MEMORY_BYTES = 80 * 10**9
NUM_TIMES = 5
SETTINGS = TrainSettings(
    checkpoint=CheckpointSettings(every=0),
    snapshot=SnapshotSettings(every=0),
    straggler=StragglerSettings(every=0),
    failure=FailureSettings(max_attempts=100),
)
"""Nothing but steps and losses; and no step commits between some of the losses."""

Result = TypeVar("Result")


@dataclass
class Simulation:
    """Drives the core and times each step."""

    core: Core = field(default_factory=Core)
    now: float = 0.0
    num_events: int = 0
    busy_s: float = 0.0
    longest_s: float = 0.0

    def post(self, events: Iterable[Event]) -> list[Command]:
        """Pass the events to the core in order; return all commands."""
        commands: list[Command] = []
        for event in events:
            self.now += 1e-6
            began = time.process_time()
            commands += self.core.step(self.now, event)
            self.core.next_deadline()
            took_s = time.process_time() - began
            self.num_events += 1
            self.busy_s += took_s
            self.longest_s = max(self.longest_s, took_s)
        return commands

    def command_of(self, kind: type, commands: list[Command]) -> Command:
        return next(command for command in commands if isinstance(command, kind))

    def form(self, form: Form) -> Resume:
        """Answer a Form for every worker, then the Reshard."""
        workers, generation = form.plan.participants, form.generation
        moved = self.post(GroupFormed(worker, generation) for worker in workers)
        self.command_of(Reshard, moved)
        ready = (StateReady(w, generation, 0, 0, 0.0, 1, 1, 1) for w in workers)
        return self.command_of(Resume, self.post(ready))

    def commit(self, resume: Resume, num_steps: int) -> None:
        state = self.core.state
        for _ in range(num_steps):
            step, generation = state.committed_step + 1, resume.generation
            record = StepRecord(
                self.now, step, generation, len(resume.workers), 1.0, 1, 1e-3, 1.0, 1.0, False
            )
            vote = Vote(step, 1.0, 1, 1.0, len(resume.workers))
            self.post([StepCommitted(generation, record, vote)])

    def lose(self, worker: str) -> Form:
        """Lose a worker: the survivors quiesce, and the core makes a new assignment."""
        abort = self.command_of(Abort, self.post([WorkerLost(worker, "SIGKILL")]))
        step = self.core.state.committed_step
        quiesced = (Quiesced(w, abort.generation, step) for w in abort.workers)
        return self.command_of(Form, self.post(quiesced))


@dataclass(frozen=True)
class CoreTimes:
    events_per_s: float
    decisions_s: list[float]
    """The step of the core that makes the new assignment, for each loss."""
    losses_s: list[float]
    """All steps of the core from a loss to the new assignment, with every survivor's report."""


def time_core(num_workers: int) -> CoreTimes:
    """Start a run, train, and lose workers one after the other."""
    simulation = Simulation()
    policy = policy_of(SETTINGS, 1, num_workers, "core")
    target_layout = TargetLayout(dp=None, fsdp=None, max_workers=num_workers)
    job = Job(num_microbatches=num_workers, state_bytes=2**40, steps=10**9)
    names = [f"w{i}" for i in range(num_workers)]
    simulation.post([RunOpened(1, policy, target_layout, job), StoreReady("127.0.0.1", 1)])
    ready = (WorkerReady(w, f"n{i // WORKERS_PER_NODE}", i) for i, w in enumerate(names))
    resume = simulation.form(simulation.command_of(Form, simulation.post(ready)))
    decisions_s, losses_s = [], []
    for loss in range(NUM_LOSSES):
        simulation.commit(resume, NUM_STEPS // NUM_LOSSES)
        gc.collect()
        busy_s, simulation.longest_s = simulation.busy_s, 0.0
        form = simulation.lose(names[(loss + 1) * num_workers // (NUM_LOSSES + 1)])
        decisions_s.append(simulation.longest_s)
        losses_s.append(simulation.busy_s - busy_s)
        resume = simulation.form(form)
    return CoreTimes(simulation.num_events / simulation.busy_s, decisions_s, losses_s)


def llama_405b() -> tuple[TensorSpec, ...]:
    """Llama 3.1 405B (Grattafiori et al., 2024) with AdamW's two moments for each parameter."""
    dim, hidden_dim, kv_dim, vocab_size = 16_384, 53_248, 1_024, 128_256
    layer = {
        "attention.wq": ((dim, dim), 0),
        "attention.wk": ((kv_dim, dim), 0),
        "attention.wv": ((kv_dim, dim), 0),
        "attention.wo": ((dim, dim), 1),
        "feed_forward.w1": ((hidden_dim, dim), 0),
        "feed_forward.w3": ((hidden_dim, dim), 0),
        "feed_forward.w2": ((dim, hidden_dim), 1),
        "attention_norm": ((dim,), None),
        "feed_forward_norm": ((dim,), None),
    }
    ends = {
        "embedding": ((vocab_size, dim), 0),
        "norm": ((dim,), None),
        "head": ((vocab_size, dim), 0),
    }
    specs: list[TensorSpec] = []
    for kind, prefix in (
        ("parameter", ""),
        ("optimizer", "exp_avg."),
        ("optimizer", "exp_avg_sq."),
    ):
        for name, (shape, tp_dim) in ends.items():
            specs.append(TensorSpec(prefix + name, shape, fsdp_dim=0, tp_dim=tp_dim, kind=kind))
        for number in range(NUM_LAYERS):
            for name, (shape, tp_dim) in layer.items():
                full_name = f"{prefix}layers.{number}.{name}"
                specs.append(
                    TensorSpec(
                        full_name, shape, "float32", number, 0, tp_dim, None, kind, LAYER_COSTS
                    )
                )
    return tuple(specs)


@dataclass(frozen=True)
class Derivation:
    layouts: str
    assign_s: list[float]
    derive_s: list[float]
    transfers: Transfers


def time_derivation(
    specs: tuple[TensorSpec, ...], before: TargetLayout, after: TargetLayout
) -> Derivation:
    """Lose a node with 8 of 16,384 workers; some survivors derive their transfers."""
    names = [f"w{i}" for i in range(16_384)]
    nodes = [i // WORKERS_PER_NODE for i in range(len(names))]
    topology = {
        name: Place(f"n{node}", f"r{node // NODES_PER_RACK}")
        for name, node in zip(names, nodes, strict=True)
    }
    options = {"topology": topology, "job": JOB, "memory_bytes": MEMORY_BYTES}
    old = assign(None, names, generation=1, target_layout=before, **options)
    assert isinstance(old, Assignment), old
    dead = set(old.members[8_000:8_008])
    living = [name for name in names if name not in dead]
    proposals = [
        timed(lambda: propose(old, living, generation=2, target_layout=after, **options))
        for _ in range(NUM_TIMES)
    ]
    proposal = proposals[0][1]
    assert isinstance(proposal, Proposal), proposal
    new = proposal.assignment
    plan = ReshardPlan(0, 1, old, new, tuple(sorted(set(old.members) - dead)))
    sampled = new.members[:: len(new.members) // 9]
    derived = [timed(lambda worker=worker: derive(specs, plan, worker)) for worker in sampled]
    largest = max((transfers for _, transfers in derived), key=lambda t: t.bytes_moved)
    layouts = f"{old.layout} -> {new.layout}"
    assign_s = [took_s for took_s, _ in proposals]
    return Derivation(layouts, assign_s, [took_s for took_s, _ in derived], largest)


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    gc.collect()
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--workers", type=int, default=NUM_WORKERS)
    options = arguments.parse_args()
    times = time_core(options.workers)
    rows = [
        ["events a second", f"{times.events_per_s:,.0f}"],
        ["the step that makes the new assignment", in_ms(times.decisions_s)],
        ["all steps from the loss to the new assignment", in_ms(times.losses_s)],
    ]
    show_table(f"core with {options.workers:,} workers", ["what", "median (worst)"], rows)
    musts = [Must("a new assignment after a loss", median(times.decisions_s) * 1000, 50, "ms")]
    specs = llama_405b()
    for before, after in CHANGES:
        derivation = time_derivation(specs, TargetLayout.parse(before), TargetLayout.parse(after))
        show_derivation(derivation, len(specs))
        for timed_part, times_s in (
            ("the assignment", derivation.assign_s),
            ("one worker's transfers", derivation.derive_s),
        ):
            must = f"{timed_part}, {derivation.layouts}"
            musts.append(Must(must, median(times_s) * 1000, 100, "ms"))
    return conclude(musts, options.check)


def show_derivation(derivation: Derivation, num_tensors: int) -> None:
    transfers = derivation.transfers
    rows = [
        ["assignment", in_ms(derivation.assign_s)],
        ["one worker's transfers", in_ms(derivation.derive_s)],
        ["pieces received, sent", f"{len(transfers.receives):,}, {len(transfers.sends):,}"],
        ["bytes received", f"{transfers.bytes_moved:,}"],
    ]
    title = f"405 B parameters, {num_tensors:,} tensors: {derivation.layouts}"
    show_table(title, ["what", "median (worst)"], rows)


def in_ms(times_s: list[float]) -> str:
    return f"{median(times_s) * 1000:.1f} ({max(times_s) * 1000:.1f}) ms"


if __name__ == "__main__":
    sys.exit(main())
