"""What a simulated run is: drawn from a seed, or written down."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from sim.faults import (
    Fault,
    draw_bad_numbers,
    draw_controller_restarts,
    draw_drains,
    draw_faults,
    draw_frozen_keepers,
    draw_long_absence,
    draw_long_notices,
    draw_node_faults,
    draw_relayouts,
    draw_slow_workers,
    draw_spoilt_nodes,
    draw_storage_faults,
)

from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.policy import Policy
from elastic.protocol.reattachment import NUM_KEPT_EVENTS
from elastic.protocol.step_records import NUM_KEPT_RECORDS, NUM_SENT_RECORDS

NUM_MICROBATCHES = 12


@dataclass
class Scenario:
    """One run: what is asked for, what it runs on, and what befalls it."""

    seed: int = 0
    policy: Policy = field(default_factory=lambda: policy_of(2, 3))
    layout: str = ""
    job: Job = field(default_factory=lambda: Job(NUM_MICROBATCHES, steps=10))
    eval_every: int = 0
    memory_bytes: int | None = None
    workers_per_node: int = 1
    num_nodes: int | None = None
    """Each with room for so many workers; without a number there is always another."""
    num_slow_starters: int = 0
    step_s: tuple[float, float] = (0.02, 0.05)
    unwind_s: tuple[float, float] = (0.001, 0.01)
    form_s: tuple[float, float] = (0.01, 0.03)
    absence_s: tuple[float, float] = (0.3, 4.0)
    """Of a controller that dies."""
    num_kept_events: int = NUM_KEPT_EVENTS
    num_kept_records: int = NUM_KEPT_RECORDS
    num_sent_records: int = NUM_SENT_RECORDS
    horizon_s: float = 900.0
    """By then it is over."""
    faults: list[Fault] = field(default_factory=list)

    @property
    def target_layout(self) -> TargetLayout:
        return TargetLayout.parse(self.layout, self.policy.max_workers)


def policy_of(min_workers: int, max_workers: int, snapshot_every: int = 0) -> Policy:
    """The defaults' proportions, in a world where a step takes 50 ms."""
    return Policy(
        min_workers,
        max_workers,
        start_timeout_s=4.0,
        collective_timeout_s=3.0,
        form_timeout_s=3.0,
        reshard_timeout_s=6.0,
        hang_timeout_s=4.0,
        first_step_timeout_s=5.0,
        growth_settle_s=0.5,
        save_timeout_s=6.0,
        save_backoff_s=0.5,
        restart_backoff_s=0.5,
        snapshot_every=snapshot_every,
        snapshot_server_timeout_s=0.5,
        snapshot_server_grace_s=0.1,
        drain_grace_s=2.0,
    )


def bound_s(policy: Policy) -> float:
    """Invariant 9: how long after the last fault until the run trains, waits or has stopped.

    A hang is noticed, whoever is needed is waited for, a vote is settled, a try at forming and
    one at moving the state come to nothing, and workers start anew.
    """
    return (
        policy.first_step_timeout_s
        + 2 * policy.collective_timeout_s
        + policy.form_timeout_s
        + policy.reshard_timeout_s
        + policy.save_timeout_s
        + policy.start_timeout_s
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
    """The scenario of a seed, with keepers, and faults that strike them and whole nodes."""
    scenario = drawn(seed)
    random = Random(f"snapshots/{seed}")
    every, most = random.choice((1, 1, 1, 2, 3)), scenario.policy.max_workers
    if most > 1 and not scenario.memory_bytes:
        scenario.layout = random.choice((f"fsdp={most}", f"fsdp={most}", "pp=2", "tp=2", ""))
    scenario.policy = replace(scenario.policy, snapshot_every=every, snapshot_server_timeout_s=0.5)
    scenario.faults = [*scenario.faults, *draw_node_faults(random)]
    return scenario


def drawn_with_frozen_keepers(seed: int) -> Scenario:
    """A scenario with keepers, of which some stand still."""
    random = Random(f"frozen/{seed}")
    scenario = random.choice((drawn_with_snapshots, drawn_with_parities))(seed)
    scenario.faults = [*scenario.faults, *draw_frozen_keepers(random)]
    return scenario


def drawn_with_scarcity(seed: int) -> Scenario:
    """A scenario in which growth is weighed, spares are given back, and a run may give way."""
    random = Random(f"scarcity/{seed}")
    draws = (drawn, drawn_with_snapshots, drawn_with_relayouts)
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
    """The same on several nodes, whose parts are coded in sets."""
    scenario = drawn_with_snapshots(seed)
    random = Random(f"parities/{seed}")
    most = random.choice((3, 4, 4, 5, 6, 6))
    scenario.layout, scenario.memory_bytes = f"fsdp={most}", None
    scenario.workers_per_node = random.choice((1, 1, 2)) if most == 6 else 1
    scenario.policy = replace(
        scenario.policy,
        min_workers=random.randint(1, most),
        max_workers=most,
        snapshot_redundancy=random.choice(("xor:2", "xor:3", "xor:5")),
    )
    return scenario


def drawn_with_drains(seed: int) -> Scenario:
    """The scenario of a seed, with keepers and notices of all lengths among what befalls it."""
    scenario = drawn_with_snapshots(seed)
    random = Random(f"drains/{seed}")
    scenario.job = replace(scenario.job, steps=random.choice((40, 120)))
    scenario.workers_per_node = random.choice((1, 1, 2))
    scenario.faults = [*scenario.faults, *draw_drains(random)]
    return scenario


def drawn_with_long_notices(seed: int) -> Scenario:
    """A run to which nothing happens but that nodes announce their end in good time."""
    scenario = drawn_with_snapshots(seed)
    random = Random(f"notices/{seed}")
    most = random.choice((3, 4, 6))
    scenario.layout = random.choice(("", f"fsdp={most}", "dp=2", "pp=2", "tp=2"))
    scenario.memory_bytes, scenario.num_slow_starters = None, 0
    scenario.workers_per_node = random.choice((1, 1, 2))
    scenario.job = replace(scenario.job, steps=250)  # they last beyond the announced ends
    scenario.policy = replace(scenario.policy, min_workers=1, max_workers=most)
    scenario.faults = draw_long_notices(random)
    return scenario


def drawn_with_storage_faults(seed: int) -> Scenario:
    """The scenario of a seed, with checkpoints by steps and by time, of which some are dropped, and
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
        max_skipped=random.choice((0, 5, 5)),  # more than are told one by one
        spike_factor=random.choice((0.0, 2.0, 2.0)),
        spike_window=random.choice((2, 4, 8)),
        audit_every=random.choice((0, 1, 2, 3)),
        audit_rollback=random.choice((False, True)),
    )
    scenario.faults = [*scenario.faults, *draw_bad_numbers(random)]
    return scenario


def drawn_with_relayouts(seed: int) -> Scenario:
    """The scenario of a seed, with wishes for other layouts among what befalls it."""
    scenario = drawn(seed)
    random = Random(f"relayouts/{seed}")
    scenario.faults = [*scenario.faults, *draw_relayouts(random)]
    return scenario


def drawn_with_controller_restarts(seed: int) -> Scenario:
    """A scenario of any kind, in which the controller dies now and then, and comes back."""
    random = Random(f"controller/{seed}")
    draws = (drawn, drawn_with_snapshots, drawn_with_storage_faults, drawn_with_relayouts)
    scenario = random.choice(draws)(seed)
    if random.random() < 0.5:
        scenario.faults = random.sample(scenario.faults, min(1, len(scenario.faults)))
    scenario.faults = [*scenario.faults, *draw_controller_restarts(random)]
    return scenario


def drawn_with_slow_workers(seed: int) -> Scenario:
    """A scenario with workers that turn slow, and mostly a spare or two."""
    random = Random(f"slow/{seed}")
    scenario = random.choice((drawn, drawn_with_snapshots, drawn_with_relayouts))(seed)
    most = scenario.policy.max_workers + random.choice((0, 1, 1, 2))
    num_members = max(1, most - random.choice((0, 1, 1, 2)))
    if not scenario.memory_bytes:
        scenario.layout = random.choice((f"dp={num_members}", f"fsdp={num_members}", ""))
    scenario.job = replace(scenario.job, steps=random.choice((30, 60)))
    scenario.policy = replace(
        scenario.policy,
        max_workers=most,
        straggler_every=random.choice((1, 2, 3)),
        straggler_reports=random.choice((1, 2, 3)),
    )
    scenario.faults = [*scenario.faults, *draw_slow_workers(random)]
    return scenario


def drawn_with_spoilt_nodes(seed: int) -> Scenario:
    """A few nodes that are used again and again, on some of which workers die and die."""
    random = Random(f"spoilt/{seed}")
    scenario = random.choice((drawn, drawn_with_snapshots))(seed)
    scenario.num_nodes = random.choice((2, 2, 3, 4))
    most = scenario.policy.max_workers
    scenario.workers_per_node = -(-most // scenario.num_nodes) + random.choice((0, 1, most))
    scenario.job = replace(scenario.job, steps=random.choice((60, 200)))
    num_spoilt = 1 if scenario.num_nodes == 2 else random.choice((1, 2))
    if scenario.num_nodes == 3:
        num_spoilt = 1  # the median node is healthy, or nobody knows which are not
    num_spoilt = min(num_spoilt, most - 1)  # so is a node of some worker
    healthy_room = scenario.workers_per_node * (scenario.num_nodes - num_spoilt)
    scenario.policy = replace(
        scenario.policy,
        min_workers=min(scenario.policy.min_workers, healthy_room),
        quarantine_after=random.choice((1, 2, 3)),
        crash_window_s=random.choice((10.0, 100.0)),
        quarantine_s=random.choice((1.0, 5.0, 500.0)),
        quarantine_patience_s=Random(f"patience/{seed}").choice((0.5, 10.0, 1e6)),
    )
    others = [fault for fault in scenario.faults if fault.action != "restart"]
    scenario.faults = [*others[:2], *draw_spoilt_nodes(random, num_spoilt)]
    return scenario


def drawn_with_watching_and_restarts(seed: int) -> Scenario:
    """Slow workers or spoilt nodes, and a controller that dies now and then."""
    random = Random(f"watching/{seed}")
    scenario = random.choice((drawn_with_slow_workers, drawn_with_spoilt_nodes))(seed)
    scenario.faults = [*scenario.faults, *draw_controller_restarts(random)]
    return scenario


def drawn_with_long_absences(seed: int) -> Scenario:
    """A controller that is away for many steps, longer than buffers last, and workers that die
    meanwhile or soon after; a step takes from 1 ms to 60 s."""
    random = Random(f"absence/{seed}")
    step_s = random.choice((0.001, 0.01, 0.1, 1.0, 60.0))
    num_steps = random.choice((70, 150, 400, 1200))
    most = random.choice((1, 2, 2, 3, 4))
    layouts = {1: ("",), 2: ("", "fsdp=2"), 3: ("", "fsdp=3"), 4: ("dp=2,fsdp=2", "", "pp=2")}
    every = random.choice((0, 1, 1))
    policy = policy_of(random.randint(1, most), most, every)
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
        random.choice(layouts[most]),
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
    """Workers die, hang or stand still on machines so busy that some survivors unwind in
    milliseconds and others in half a minute, and that groups may form later than they should;
    `policy` is what users get."""
    random = Random(f"load/{seed}")
    most = random.choice((2, 3, 4, 6, 8))
    can_hang = random.random() < 0.3
    step_s = random.choice((0.001, 0.02, 0.2))
    steps = random.choice((40, 80))
    actions = ["kill", "kill", "kill two", "kill and tell late", "freeze"]
    faults = [
        Fault(
            "hang" if can_hang and not number else random.choice(actions),
            random.choice(("compute", "vote", "read", "apply", "applied", "reported")),
            random.randint(most, most * 20),
        )
        for number in range(random.randint(3, 6))
    ]
    return Scenario(
        seed,
        replace(policy, min_workers=1, max_workers=most),
        "",
        Job(24, state_bytes=1000, steps=steps),
        step_s=(step_s, 10 * step_s),
        unwind_s=(0.001, random.choice((0.01, 2.0, 30.0))),
        form_s=random.choice(((0.01, 0.03), (0.01, 0.03), (1.0, 45.0))),
        horizon_s=100_000.0,
        faults=faults,
    )
