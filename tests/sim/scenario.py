"""Scenarios of simulated runs: drawn from a seed, or written down.

The strings that seed the draws never change, since kept seeds depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from sim.faults import (
    Fault,
    draw_bad_numbers,
    draw_broken_nodes,
    draw_controller_restarts,
    draw_drains,
    draw_faults,
    draw_frozen_snapshot_servers,
    draw_layout_requests,
    draw_long_absence,
    draw_long_notices,
    draw_node_faults,
    draw_slow_workers,
    draw_storage_faults,
)
from users_policy import quiet_policy

from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.policy import Policy
from elastic.protocol.step_records import NUM_KEPT_RECORDS, NUM_SENT_RECORDS
from elastic.replay.reattachment import NUM_KEPT_EVENTS

NUM_MICROBATCHES = 12


@dataclass
class Scenario:
    """One run: its settings, its cluster, and its faults."""

    seed: int = 0
    policy: Policy = field(default_factory=lambda: policy_of(2, 3))
    layout: str = ""
    job: Job = field(default_factory=lambda: Job(NUM_MICROBATCHES, steps=10))
    eval_every: int = 0
    memory_bytes: int | None = None
    workers_per_node: int = 1
    num_nodes: int | None = None
    """Each with capacity for `workers_per_node`; without a number there is always another."""
    num_slow_starters: int = 0
    step_s: tuple[float, float] = (0.02, 0.05)
    unwind_s: tuple[float, float] = (0.001, 0.01)
    form_s: tuple[float, float] = (0.01, 0.03)
    snapshot_s: tuple[float, float] = (0.002, 0.03)
    absence_s: tuple[float, float] = (0.3, 4.0)
    """How long a controller that dies is away."""
    num_kept_events: int = NUM_KEPT_EVENTS
    num_kept_records: int = NUM_KEPT_RECORDS
    num_sent_records: int = NUM_SENT_RECORDS
    horizon_s: float = 900.0
    """The run must end by then."""
    faults: list[Fault] = field(default_factory=list)

    @property
    def target_layout(self) -> TargetLayout:
        return TargetLayout.parse(self.layout, self.policy.max_workers)


def policy_of(min_workers: int, max_workers: int, snapshot_every: int = 0) -> Policy:
    """The defaults' proportions, in a world where a step takes 50 ms."""
    return quiet_policy(
        min_workers,
        max_workers,
        start_timeout_s=4.0,
        collective_timeout_s=3.0,
        form_timeout_s=3.0,
        reshard_timeout_s=6.0,
        hang_timeout_s=4.0,
        first_step_timeout_s=5.0,
        growth_wait_s=0.5,
        save_timeout_s=6.0,
        save_backoff_s=0.5,
        restart_backoff_s=0.5,
        snapshot_every=snapshot_every,
        snapshot_server_timeout_s=0.5,
        snapshot_server_grace_s=0.1,
        drain_grace_s=2.0,
    )


def bound_s(policy: Policy) -> float:
    """Invariant 9: the longest time from the last fault until the run trains, waits or has stopped.

    In that time a hang is noticed, pending workers are waited for, survivors roll forward, one
    attempt at forming and one at resharding fail, and workers start again.
    """
    return (
        policy.first_step_timeout_s
        + 2 * policy.collective_timeout_s
        + policy.form_timeout_s
        + policy.reshard_timeout_s
        + policy.save_timeout_s
        + 2 * policy.start_timeout_s
    )


def drawn(seed: int) -> Scenario:
    """The scenario of a seed."""
    random = Random(f"scenario/{seed}")
    max_workers = random.choice((1, 2, 2, 3, 3, 4, 4, 5, 6))
    min_workers = random.randint(1, max_workers)
    layouts = ["", "", "", f"fsdp={max_workers}"]
    if max_workers >= 2:
        layouts += ["tp=2", "pp=2", "fsdp=2"]
    if max_workers >= 4:
        layouts += ["dp=2,fsdp=2"] * 3 + ["dp=2,tp=2"]
    layout = random.choice(layouts)
    memory_bytes = random.choice((None, 700, 450)) if not layout and max_workers > 3 else None
    job = Job(
        NUM_MICROBATCHES,
        state_bytes=1000,
        steps=random.randint(5, 40),
        checkpoint_every=random.choice((0, 2, 3, 4)),
    )
    return Scenario(
        seed,
        policy_of(min_workers, max_workers),
        layout,
        job,
        eval_every=random.choice((0, 0, 4)),
        memory_bytes=memory_bytes,
        workers_per_node=random.choice((1, 1, 2)),
        num_slow_starters=random.choice((0, 0, 0, 1, 2)),
        faults=draw_faults(random),
    )


def drawn_with_snapshots(seed: int) -> Scenario:
    """The scenario of a seed with snapshot servers, and faults of these and of whole nodes."""
    scenario = drawn(seed)
    random = Random(f"snapshots/{seed}")
    every, max_workers = random.choice((1, 1, 1, 2, 3)), scenario.policy.max_workers
    if max_workers > 1 and not scenario.memory_bytes:
        scenario.layout = random.choice(
            (f"fsdp={max_workers}", f"fsdp={max_workers}", "pp=2", "tp=2", "")
        )
    scenario.policy = replace(scenario.policy, snapshot_every=every, snapshot_server_timeout_s=0.5)
    scenario.faults = [*scenario.faults, *draw_node_faults(random)]
    return scenario


def drawn_with_frozen_snapshot_servers(seed: int) -> Scenario:
    """A scenario with snapshot servers, some of which freeze."""
    random = Random(f"frozen/{seed}")
    scenario = random.choice((drawn_with_snapshots, drawn_with_parities))(seed)
    scenario.faults = [*scenario.faults, *draw_frozen_snapshot_servers(random)]
    return scenario


def drawn_with_scarcity(seed: int) -> Scenario:
    """A scenario in which growth may not pay, standby workers are released, and the gang backs
    off."""
    random = Random(f"scarcity/{seed}")
    draws = (drawn, drawn_with_snapshots, drawn_with_layout_requests)
    scenario = random.choice(draws)(seed)
    scenario.policy = replace(
        scenario.policy,
        growth_horizon_s=random.choice((0.1, 1.0, 30.0)),
        standby_timeout_s=random.choice((0.2, 1.0)),
        gang_timeout_s=random.choice((1.5, 4.0)),
        gang_pause_s=0.2,
        gang_jitter=random.random(),
    )
    return scenario


def drawn_with_parities(seed: int) -> Scenario:
    """The scenario with snapshots, on several nodes, with parities instead of copies."""
    scenario = drawn_with_snapshots(seed)
    random = Random(f"parities/{seed}")
    max_workers = random.choice((3, 4, 4, 5, 6, 6))
    scenario.layout, scenario.memory_bytes = f"fsdp={max_workers}", None
    scenario.workers_per_node = random.choice((1, 1, 2)) if max_workers == 6 else 1
    scenario.policy = replace(
        scenario.policy,
        min_workers=random.randint(1, max_workers),
        max_workers=max_workers,
        snapshot_redundancy=random.choice(("xor:2", "xor:3", "xor:5")),
    )
    return scenario


def drawn_with_drains(seed: int) -> Scenario:
    """The scenario of a seed, with snapshot servers and notices of all lengths."""
    scenario = drawn_with_snapshots(seed)
    random = Random(f"drains/{seed}")
    scenario.job = replace(scenario.job, steps=random.choice((40, 120)))
    scenario.workers_per_node = random.choice((1, 1, 2))
    scenario.faults = [*scenario.faults, *draw_drains(random)]
    return scenario


def drawn_with_long_notices(seed: int) -> Scenario:
    """A run whose only faults are notices of nodes long before their end."""
    scenario = drawn_with_snapshots(seed)
    random = Random(f"notices/{seed}")
    max_workers = random.choice((3, 4, 6))
    scenario.layout = random.choice(("", f"fsdp={max_workers}", "dp=2", "pp=2", "tp=2"))
    scenario.memory_bytes, scenario.num_slow_starters = None, 0
    scenario.workers_per_node = random.choice((1, 1, 2))
    scenario.job = replace(scenario.job, steps=250)  # they last beyond the announced ends
    scenario.policy = replace(scenario.policy, min_workers=1, max_workers=max_workers)
    scenario.faults = draw_long_notices(random)
    return scenario


def drawn_with_storage_faults(seed: int) -> Scenario:
    """The scenario of a seed, with checkpoints by steps and by time, of which some are removed, and
    storage that fills up or flips bits."""
    scenario = drawn(seed)
    random = Random(f"storage/{seed}")
    scenario.job = replace(scenario.job, checkpoint_every=random.choice((0, 1, 2, 3)))
    scenario.policy = replace(
        scenario.policy,
        checkpoint_every_s=random.choice((0.0, 0.2, 1.0)),
        keep_last=random.choice((0, 1, 2)),
        keep_every=random.choice((0, 4)),
        keep_best=random.choice((0, 1)),
    )
    scenario.faults = [*scenario.faults, *draw_storage_faults(random)]
    if random.random() < 0.3:
        scenario.job = replace(scenario.job, checkpoint_every=0)
        scenario.policy = replace(
            scenario.policy,
            checkpoint_every_s=0.0,
            checkpoint_auto=True,
            checkpoint_least_s=random.choice((0.1, 0.5)),
            checkpoint_most_s=random.choice((0.5, 2.0)),
        )
    return scenario


def drawn_with_bad_numbers(seed: int) -> Scenario:
    """The scenario of a seed, with numbers that are not finite, spikes and false checksums."""
    scenario = drawn_with_snapshots(seed) if seed % 4 == 0 else drawn(seed)
    random = Random(f"numbers/{seed}")
    scenario.policy = replace(
        scenario.policy,
        max_skipped=random.choice((0, 5, 5)),  # single bad numbers do not end the run
        spike_factor=random.choice((0.0, 2.0, 2.0)),
        spike_window=random.choice((2, 4, 8)),
        audit_every=random.choice((0, 1, 2, 3)),
        audit_rollback=random.choice((False, True)),
    )
    scenario.faults = [*scenario.faults, *draw_bad_numbers(random)]
    return scenario


def drawn_with_layout_requests(seed: int) -> Scenario:
    """The scenario of a seed, with layout requests among its faults."""
    scenario = drawn(seed)
    random = Random(f"relayouts/{seed}")
    scenario.faults = [*scenario.faults, *draw_layout_requests(random)]
    return scenario


def drawn_with_controller_restarts(seed: int) -> Scenario:
    """A scenario of any kind, in which the controller dies and restarts."""
    random = Random(f"controller/{seed}")
    draws = (drawn, drawn_with_snapshots, drawn_with_storage_faults, drawn_with_layout_requests)
    scenario = random.choice(draws)(seed)
    if random.random() < 0.5:
        scenario.faults = random.sample(scenario.faults, min(1, len(scenario.faults)))
    scenario.faults = [*scenario.faults, *draw_controller_restarts(random)]
    return scenario


def drawn_with_slow_workers(seed: int) -> Scenario:
    """A scenario with stragglers, and often one or two standby workers."""
    random = Random(f"slow/{seed}")
    scenario = random.choice((drawn, drawn_with_snapshots, drawn_with_layout_requests))(seed)
    max_workers = scenario.policy.max_workers + random.choice((0, 1, 1, 2))
    num_members = max(1, max_workers - random.choice((0, 1, 1, 2)))
    if not scenario.memory_bytes:
        scenario.layout = random.choice((f"dp={num_members}", f"fsdp={num_members}", ""))
    scenario.job = replace(scenario.job, steps=random.choice((30, 60)))
    scenario.policy = replace(
        scenario.policy,
        max_workers=max_workers,
        straggler_every=random.choice((1, 2, 3)),
        straggler_reports=random.choice((1, 2, 3)),
    )
    scenario.faults = [*scenario.faults, *draw_slow_workers(random)]
    return scenario


def drawn_with_broken_nodes(seed: int) -> Scenario:
    """A few nodes that are used again and again, on some of which workers die repeatedly."""
    random = Random(f"spoilt/{seed}")
    scenario = random.choice((drawn, drawn_with_snapshots))(seed)
    scenario.num_nodes = random.choice((2, 2, 3, 4))
    max_workers = scenario.policy.max_workers
    scenario.workers_per_node = -(-max_workers // scenario.num_nodes) + random.choice(
        (0, 1, max_workers)
    )
    scenario.job = replace(scenario.job, steps=random.choice((60, 200)))
    num_broken = 1 if scenario.num_nodes == 2 else random.choice((1, 2))
    if scenario.num_nodes == 3:
        num_broken = 1  # the median node must be healthy to show which are broken
    num_broken = min(num_broken, max_workers - 1)  # some worker has a healthy node
    healthy_capacity = scenario.workers_per_node * (scenario.num_nodes - num_broken)
    if healthy_capacity * (scenario.memory_bytes or 10**6) < 1.2 * scenario.job.state_bytes:
        scenario.memory_bytes = None  # the broken node would be needed, on which no run can last
    scenario.policy = replace(
        scenario.policy,
        min_workers=min(scenario.policy.min_workers, healthy_capacity),
        quarantine_after=random.choice((1, 2, 3)),
        crash_window_s=random.choice((10.0, 100.0)),
        quarantine_s=random.choice((1.0, 5.0, 500.0)),
        quarantine_patience_s=Random(f"patience/{seed}").choice((0.5, 10.0, 1e6)),
    )
    others = [fault for fault in scenario.faults if fault.action != "restart"]
    scenario.faults = [*others[:2], *draw_broken_nodes(random, num_broken)]
    return scenario


def drawn_with_watching_and_restarts(seed: int) -> Scenario:
    """Stragglers or broken nodes, and a controller that dies and restarts."""
    random = Random(f"watching/{seed}")
    scenario = random.choice((drawn_with_slow_workers, drawn_with_broken_nodes))(seed)
    scenario.faults = [*scenario.faults, *draw_controller_restarts(random)]
    return scenario


def drawn_with_long_absences(seed: int) -> Scenario:
    """A controller that is away for more steps than buffers hold, and workers that die meanwhile or
    soon after. A step takes from 1 ms to 60 s."""
    random = Random(f"absence/{seed}")
    step_s = random.choice((0.001, 0.01, 0.1, 1.0, 60.0))
    num_steps = random.choice((70, 150, 400, 1200))
    max_workers = random.choice((1, 2, 2, 3, 4))
    layouts = {1: ("",), 2: ("", "fsdp=2"), 3: ("", "fsdp=3"), 4: ("dp=2,fsdp=2", "", "pp=2")}
    every = random.choice((0, 1, 1))
    policy = policy_of(random.randint(1, max_workers), max_workers, every)
    policy = replace(
        policy,
        first_step_timeout_s=5.0 + 10 * step_s,
        collective_timeout_s=3.0 + 4 * step_s,
        checkpoint_every_s=random.choice((0.0, 50 * step_s)),
    )
    job = Job(
        NUM_MICROBATCHES,
        state_bytes=1000,
        steps=num_steps + random.randint(30, 60),
        checkpoint_every=random.choice((0, 0, 7)),
    )
    absence_s = num_steps * 1.5 * (step_s + 0.006)
    return Scenario(
        seed,
        policy,
        random.choice(layouts[max_workers]),
        job,
        step_s=(step_s, 2 * step_s),
        absence_s=(0.7 * absence_s, absence_s),
        num_kept_events=random.choice((30, 100, NUM_KEPT_EVENTS)),
        num_kept_records=random.choice((16, 100, NUM_KEPT_RECORDS, NUM_KEPT_RECORDS)),
        num_sent_records=random.choice((5, 64, NUM_SENT_RECORDS)),
        horizon_s=900.0 + 20 * num_steps * (2 * step_s + 0.02),
        faults=draw_long_absence(random, num_steps),
    )


def drawn_under_load(seed: int, policy: Policy) -> Scenario:
    """Workers die, hang or freeze on machines under load. Some survivors unwind in milliseconds,
    others in half a minute, and forming may exceed its usual time. `policy` is what users get."""
    random = Random(f"load/{seed}")
    max_workers = random.choice((2, 3, 4, 6, 8))
    can_hang = random.random() < 0.3
    step_s = random.choice((0.001, 0.02, 0.2))
    steps = random.choice((40, 80))
    actions = ["kill", "kill", "kill two", "kill and report late", "freeze"]
    faults = [
        Fault(
            "hang" if can_hang and not number else random.choice(actions),
            random.choice(("compute", "vote", "read", "apply", "applied", "reported")),
            random.randint(max_workers, max_workers * 20),
        )
        for number in range(random.randint(3, 6))
    ]
    return Scenario(
        seed,
        replace(policy, min_workers=1, max_workers=max_workers),
        "",
        Job(24, state_bytes=1000, steps=steps),
        step_s=(step_s, 10 * step_s),
        unwind_s=(0.001, random.choice((0.01, 2.0, 30.0))),
        form_s=random.choice(((0.01, 0.03), (0.01, 0.03), (1.0, 45.0))),
        horizon_s=100_000.0,
        faults=faults,
    )
