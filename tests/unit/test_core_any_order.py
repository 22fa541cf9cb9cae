"""The core stays consistent and never raises under any sequence of events."""

from __future__ import annotations

from random import Random

import pytest
from sim.faults import LAYOUTS
from sim.reporting import command_in_words, phase_in_words
from users_policy import users_policy

from elastic.controller.core import Core
from elastic.geometry.machine_report import MachineReport
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.controller_events import WorkerAnswered, WorkersStalled
from elastic.protocol.events import (
    Audited,
    CheckpointDamaged,
    Checkpointed,
    Evaluated,
    Event,
    GroupFormed,
    LayoutRequested,
    NodeAtRisk,
    NodeDraining,
    PartFailed,
    PartFile,
    PartWritten,
    Paused,
    Progressed,
    Quiesced,
    RolledForward,
    RunOpened,
    Saved,
    StateReady,
    StepCommitted,
    StopRequested,
    StoreLost,
    StoreReady,
    Woke,
    WorkerDraining,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
    WorkerSuspected,
)
from elastic.protocol.phases import Aborting, Ended, Forming, Pausing, Resharding, Running, Saving
from elastic.protocol.votes import StepRecord, Vote
from elastic.protocol.wire import encode

pytestmark = pytest.mark.slow

NUM_EVENTS = 300


def make_step(step: int, generation: int, loss: float = 1.0) -> tuple[StepRecord, Vote]:
    """The record and the vote of a step; loss 0 means a loss that is not finite."""
    record = StepRecord(0.0, step, generation, 1, loss or None, 1, 0.1, 1.0, 0.5, skipped=not loss)
    return record, Vote(step, 1.0, 1, 1.0, 1)


def draw_helpful_event(random: Random, core: Core) -> Event:
    """An event that brings the run forward from its phase."""
    state, phase = core.state, core.state.phase
    generation, step = state.generation, state.committed_step
    starting = sorted(state.membership.records.keys() - state.membership.warm)
    match phase:
        case Forming():
            return GroupFormed(random.choice(sorted(phase.pending)), generation)
        case Resharding():
            worker = random.choice(sorted(phase.pending))
            return StateReady(worker, generation, 0, 0, 0.0, 1, 1, 2)
        case Pausing():
            return Paused(random.choice(sorted(phase.pending)), generation, step)
        case Running():
            return StepCommitted(generation, *make_step(step + 1, generation))
        case Aborting() if phase.rolling_forward:
            worker = random.choice(sorted(phase.pending))
            return RolledForward(
                worker, generation, make_step(phase.rolling_forward.step, generation)[0]
            )
        case Aborting():
            record, vote = make_step(step, generation)
            worker = random.choice(sorted(phase.pending))
            return Quiesced(worker, generation, step, vote, True, False, (record,))
    parts = [(u, w) for u in state.checkpoints.uploads.values() for w in sorted(u.pending)]
    if isinstance(phase, Saving) and parts:
        upload, worker = random.choice(parts)
        return PartWritten(worker, upload.generation, upload.step, PartFile(f"part-{worker}", 1, 1))
    if not state.store.port:
        return StoreReady("host", 1)
    if starting:
        node = f"node{random.randrange(3)}"
        machine = MachineReport(random.choice((0.01, 0.01, 0.01, 0.2)), "kind")
        return WorkerReady(random.choice(starting), node, 1, digest="same", machine=machine)
    return Woke()


def draw_splits(
    random: Random, members: tuple[str, ...]
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Audit groups in which half of the members differ from the others."""
    differing = tuple(sorted(random.sample(members, len(members) // 2)))
    groups = sorted(((*sorted(set(members) - set(differing)),), differing), key=len, reverse=True)
    return (tuple(groups),) if differing else ()


def draw_any_event(random: Random, core: Core) -> Event:
    """Any event, mostly about present workers and steps, sometimes about unknown or old ones."""
    state = core.state
    worker = random.choice([*sorted(state.membership.records), "unknown"])
    generation = state.generation - (random.random() < 0.2)
    step = state.committed_step + random.choice((-1, 0, 1, 1, 2))
    record, vote = make_step(step, generation, random.choice((0.0, 1.0, 1.0, 1.0, 9.0)))
    complete, torn = random.random() < 0.8, random.random() < 0.2
    kind = random.choice(("peer", "device", "memory", "machine", "health", "mistake", "program"))
    machine = MachineReport(
        random.choice((0.01, 0.2)), "kind", random.choice(("", "GPU-0", "GPU-1"))
    )
    events: list[Event] = [
        WorkerReady(worker, "node0", 1, digest="same", machine=machine),
        GroupFormed(worker, generation),
        StateReady(worker, generation, 0, 0, 0.0, 1, 1, 2),
        StepCommitted(generation, record, vote),
        Paused(worker, generation, step),
        Quiesced(worker, generation, step, vote, complete, torn, (record,)),
        RolledForward(worker, generation, record),
        PartWritten(worker, generation, step, PartFile(f"part-{worker}", 1, 1)),
        WorkerLost(worker, "killed"),
        WorkerLost(worker, "killed"),
        WorkerSuspected(worker, "silent"),
        WorkerAnswered(worker),
        WorkersStalled(generation, (worker,)),
        WorkerDraining(worker, "requested"),
        WorkerDraining(worker, "it is too hot", is_degraded=True),
        NodeDraining(f"node{random.randrange(3)}", random.uniform(0.0, 100.0)),
        NodeAtRisk(f"node{random.randrange(3)}", "a notice"),
        WorkerRaised(worker, generation, kind, "an error", node="node0"),
        Checkpointed(step, generation, f"step-{step}-g{generation}"),
        PartFailed(worker, generation, step, "no space left"),
        CheckpointDamaged(worker, generation, f"step-{step}-g{generation}", "a flipped bit"),
        Progressed(generation),
        Evaluated(generation, step, 1.0),
        Audited(generation, step, 2),
        Audited(generation, step, 2, draw_splits(random, state.live.members())),
        LayoutRequested("request", TargetLayout.parse(random.choice(LAYOUTS))),
        StoreLost("it died"),
        StopRequested("SIGTERM"),
        Woke(),
        Woke(),
    ]
    return random.choice(events)


def draw_opening(random: Random, incarnation: int, saved: tuple[Saved, ...]) -> RunOpened:
    max_workers = random.randint(1, 5)
    layout = random.choice(("", f"fsdp={max_workers}", "dp=2,fsdp=2", "tp=2"))
    policy = users_policy(
        random.randint(1, max_workers),
        max_workers,
        max_attempts=1000,
        max_skipped=random.choice((0, 3)),
        spike_factor=random.choice((0.0, 2.0)),
        spike_window=4,
        audit_every=random.choice((0, 1)),
        audit_rollback=random.choice((False, True)),
    )
    job = Job(8, steps=random.choice((5, 1000)), checkpoint_every=random.choice((0, 2)))
    return RunOpened(incarnation, policy, TargetLayout.parse(layout, max_workers), job, saved)


def check_invariants(core: Core) -> None:
    """Assert the invariants of every state."""
    state, phase = core.state, core.state.phase
    assert state.membership.warm <= state.membership.records.keys()
    assert state.membership.draining <= state.membership.records.keys()
    assert all(holding.holders <= state.membership.warm for holding in state.live.holdings())
    if isinstance(phase, Forming | Resharding | Pausing | Aborting):
        assert phase.pending, "a phase that waits for no worker"
        assert phase.pending <= state.membership.warm, "a phase that waits for a dead worker"
        assert core.next_deadline() is not None, "a phase without a deadline"


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_core_keeps_its_invariants_under_any_sequence_of_events(first: int) -> None:
    for seed in range(first, first + 50):
        random, core, now = Random(f"any/{seed}"), Core(), 0.0
        core.step(now, draw_opening(random, 1, ()))
        trace = [f"seed {seed}"]
        for _ in range(NUM_EVENTS):
            draw_event = draw_helpful_event if random.random() < 0.85 else draw_any_event
            event = draw_event(random, core)
            now += random.choice((0.0, 0.01, 0.5))
            deadline = core.next_deadline()
            if isinstance(event, Woke) and deadline is not None:
                now = max(now, deadline)
            if isinstance(core.state.phase, Ended):
                event = draw_opening(
                    random, core.state.incarnation + 1, tuple(core.state.checkpoints.saved)
                )
            before, generation = phase_in_words(core.state.phase), core.state.generation
            commands = core.step(now, event)
            command_text = "; ".join(map(command_in_words, commands))
            trace.append(
                f"{before} | {event} | {command_text} | {phase_in_words(core.state.phase)}"
            )
            assert core.state.generation >= generation, "\n".join(trace[-20:])
            check_invariants(core)
        encode(core.state)
