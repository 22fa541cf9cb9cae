"""The real controller under crashes, hangs, losses and restarts; checks follow each event.

Seeds are new with each commit. A failing run reports its seed, how to replay it, its faults and the
last events; continuous integration keeps the seed in `kept_seeds.txt`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim.fresh_seeds import SOAK, FreshSeeds
from sim.hung_writes import drawn_with_hung_writes, drawn_with_one_hung_write
from sim.scenario import (
    drawn,
    drawn_with_bad_numbers,
    drawn_with_broken_nodes,
    drawn_with_controller_restarts,
    drawn_with_drains,
    drawn_with_frozen_snapshot_servers,
    drawn_with_layout_requests,
    drawn_with_long_absences,
    drawn_with_long_notices,
    drawn_with_parities,
    drawn_with_scarcity,
    drawn_with_slow_workers,
    drawn_with_snapshots,
    drawn_with_storage_faults,
    drawn_with_watching_and_restarts,
)
from sim.seeds import KEPT, KEPT_CONTROLLER, KEPT_DRAINS, KEPT_PARITIES, KEPT_WITH_BAD_NUMBERS
from sim.shell_faults import drawn_with_shell_faults
from sim.simulation import simulate

from elastic.protocol.commands import Abort, Reshard, StopWorker
from elastic.protocol.events import Checkpointed
from elastic.protocol.notes import RolledBack
from elastic.protocol.step_records import NUM_KEPT_RECORDS

pytestmark = pytest.mark.slow

NUM_SEEDS = 240
NUM_SEEDS_LAYOUT_REQUESTS = 100
NUM_SEEDS_SNAPSHOTS = 60
NUM_SEEDS_PARITIES = 80
NUM_SEEDS_FROZEN = 40
NUM_SEEDS_SCARCE = 40
NUM_SEEDS_STORAGE = 40
NUM_SEEDS_NUMBERS = 40
NUM_SEEDS_CONTROLLER = 80
NUM_SEEDS_CONTROLLER_ALONE = 60
NUM_SEEDS_ABSENCES = 16
NUM_SEEDS_DRAINS = 60
NUM_SEEDS_NOTICES = 20
NUM_SEEDS_DRAINED_WORKERS = 160
NUM_SEEDS_STRAGGLERS = 40
NUM_SEEDS_BROKEN_NODES = 40
NUM_SEEDS_HUNG = 40
NUM_SEEDS_ONE_HUNG = 16
NUM_SEEDS_SHELL = 60
NUM_SEEDS_SOAK = 12_000


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 20))
def test_runs_survive_drawn_faults(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_LAYOUT_REQUESTS, 20))
def test_runs_survive_layout_requests(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_layout_requests(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_SNAPSHOTS, 20))
def test_runs_survive_faults_with_snapshots(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_snapshots(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_PARITIES, 20))
def test_runs_survive_faults_with_parities(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_parities(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_FROZEN, 20))
def test_runs_survive_frozen_snapshot_servers(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_frozen_snapshot_servers(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_SCARCE, 20))
def test_runs_survive_scarce_workers(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_scarcity(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_STORAGE, 20))
def test_runs_survive_storage_faults(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_storage_faults(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_NUMBERS, 20))
def test_runs_survive_bad_numbers(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_bad_numbers(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_DRAINS, 20))
def test_runs_survive_node_drains(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_drains(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_NOTICES, 10))
def test_a_node_drain_with_a_long_notice_costs_no_step(first: int, fresh_seeds: FreshSeeds) -> None:
    """By its end no worker trains there, no generation was aborted and no step was recomputed."""
    for seed in fresh_seeds(first, 10):
        world = simulate(drawn_with_long_notices(seed))
        sent = [command for _, _, commands, _ in world.records.trace for command in commands]
        harm = [command for command in sent if isinstance(command, Abort | RolledBack)]
        assert not harm, f"seed {seed}: {harm}"
        assert world.shell.outcome and world.shell.outcome.outcome == "completed"


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_DRAINED_WORKERS, 40))
def test_drained_workers_cost_no_evaluation(first: int, fresh_seeds: FreshSeeds) -> None:
    """Not even that of the last step, at which a drain may request a pause."""
    for seed in fresh_seeds(first, 40):
        scenario = drawn(seed)
        draining = [fault for fault in scenario.faults if fault.action == "drain a worker"]
        world = simulate(replace(scenario, eval_every=1, faults=draining))
        state = world.shell.core.state
        assert state.evaluated_step == state.job.steps, f"seed {seed}"


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_HUNG, 20))
def test_runs_survive_hung_writes(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_hung_writes(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_ONE_HUNG, 8))
def test_a_hung_write_delays_checkpoints_and_costs_no_step(
    first: int, fresh_seeds: FreshSeeds
) -> None:
    """The next one completes as soon as another worker has replaced the one that hangs."""
    for seed in fresh_seeds(first, 8):
        scenario = drawn_with_one_hung_write(seed)
        world = simulate(scenario)
        trace = world.records.trace
        whole_at = [now for now, event, _, _ in trace if isinstance(event, Checkpointed)]
        [(hung_at, _, _)] = world.struck
        delay_s = min(at for at in whole_at if at > hung_at) - hung_at
        policy = scenario.policy
        assert delay_s < policy.save_timeout_s + policy.start_timeout_s, f"seed {seed}: {delay_s}"
        sent = [command for _, _, commands, _ in trace for command in commands]
        harm = [command for command in sent if isinstance(command, Abort | RolledBack)]
        assert not harm, f"seed {seed}: {harm}"
        assert world.shell.outcome and world.shell.outcome.outcome == "completed"


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_STRAGGLERS, 20))
def test_runs_survive_stragglers(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_slow_workers(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_STRAGGLERS, 20))
def test_a_straggler_costs_no_abort_and_no_step(first: int, fresh_seeds: FreshSeeds) -> None:
    """It is drained: no generation is aborted and no step is recomputed."""
    for seed in fresh_seeds(first, 20):
        scenario = drawn_with_slow_workers(seed)
        slow = [fault for fault in scenario.faults if fault.action == "slow"]
        world = simulate(replace(scenario, faults=slow))
        sent = [command for _, _, commands, _ in world.records.trace for command in commands]
        harm = [command for command in sent if isinstance(command, Abort | RolledBack)]
        assert not harm, f"seed {seed}: {harm}"
        assert world.shell.outcome and world.shell.outcome.outcome == "completed"


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_BROKEN_NODES, 20))
def test_runs_survive_broken_nodes(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_broken_nodes(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_BROKEN_NODES, 20))
def test_stragglers_and_crash_counts_survive_controller_restarts(
    first: int, fresh_seeds: FreshSeeds
) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_watching_and_restarts(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_CONTROLLER, 20))
def test_runs_survive_controller_restarts(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_controller_restarts(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_CONTROLLER_ALONE, 20))
def test_a_controller_death_alone_costs_no_step(first: int, fresh_seeds: FreshSeeds) -> None:
    """No worker is aborted, stopped or restarted for it, and no step is recomputed."""
    for seed in fresh_seeds(first, 20):
        scenario = drawn_with_controller_restarts(seed)
        alone = [f for f in scenario.faults if f.action == "restart the controller"]
        # Workers that have received an order wait in its collective for the others.
        policy = replace(scenario.policy, collective_timeout_s=10.0)
        world = simulate(replace(scenario, policy=policy, faults=alone))
        sent = [command for _, _, commands, _ in world.records.trace for command in commands]
        harm = [c for c in sent if isinstance(c, Abort | StopWorker | RolledBack)]
        assert not harm, f"seed {seed}: {harm}"
        assert world.shell.outcome and world.shell.outcome.outcome == "completed"


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_SHELL, 20))
def test_runs_survive_faults_of_the_shell(first: int, fresh_seeds: FreshSeeds) -> None:
    """Exceptions in the controller, full disks of its logs, and another process with its lease."""
    for seed in fresh_seeds(first, 20):
        simulate(drawn_with_shell_faults(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_ABSENCES, 8))
def test_long_controller_absences_lose_no_record(first: int, fresh_seeds: FreshSeeds) -> None:
    """No tensors are relabelled (invariant 8). If any worker has the record of a step, the metrics
    have its numbers."""
    for seed in fresh_seeds(first, 8):
        scenario = drawn_with_long_absences(seed)
        world = simulate(scenario)
        sent = [command for _, _, commands, _ in world.records.trace for command in commands]
        is_live = all(c.source in ("live", "initial") for c in sent if isinstance(c, Reshard))
        if is_live and scenario.num_kept_records == NUM_KEPT_RECORDS:
            missing = [line.step for line in world.records.metrics if line.missing]
            assert not missing, f"seed {seed}: {missing}"


@pytest.mark.parametrize("seed", KEPT)
def test_kept_seeds_pass(seed: int) -> None:
    simulate(drawn(seed))


@pytest.mark.parametrize("seed", KEPT_WITH_BAD_NUMBERS)
def test_kept_seeds_with_bad_numbers_pass(seed: int) -> None:
    simulate(drawn_with_bad_numbers(seed))


@pytest.mark.parametrize("seed", KEPT_DRAINS)
def test_kept_seeds_with_drains_pass(seed: int) -> None:
    simulate(drawn_with_drains(seed))


@pytest.mark.parametrize("seed", KEPT_PARITIES)
def test_kept_seeds_with_parities_pass(seed: int) -> None:
    simulate(drawn_with_parities(seed))


@pytest.mark.parametrize("seed", KEPT_CONTROLLER)
def test_kept_seeds_with_controller_restarts_pass(seed: int) -> None:
    simulate(drawn_with_controller_restarts(seed))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SOAK, SOAK + NUM_SEEDS_SOAK, 1000))
def test_many_more(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 1000):
        simulate(drawn(seed))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SOAK, SOAK + NUM_SEEDS_SOAK // 3, 1000))
def test_many_more_with_layout_requests(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 1000):
        simulate(drawn_with_layout_requests(seed))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SOAK, SOAK + NUM_SEEDS_SOAK // 3, 1000))
def test_many_more_with_bad_numbers(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 1000):
        simulate(drawn_with_bad_numbers(seed))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SOAK, SOAK + NUM_SEEDS_SOAK // 4, 1000))
def test_many_more_with_parities(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 1000):
        simulate(drawn_with_parities(seed))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SOAK, SOAK + NUM_SEEDS_SOAK // 3, 1000))
def test_many_more_with_node_drains(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 1000):
        simulate(drawn_with_drains(seed))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SOAK, SOAK + NUM_SEEDS_SOAK // 2, 1000))
def test_many_more_with_controller_restarts(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 1000):
        simulate(drawn_with_controller_restarts(seed))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SOAK, SOAK + NUM_SEEDS_SOAK // 6, 200))
def test_many_more_with_long_controller_absences(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 200):
        simulate(drawn_with_long_absences(seed))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SOAK, SOAK + NUM_SEEDS_SOAK // 4, 1000))
def test_many_more_with_faults_of_the_shell(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 1000):
        simulate(drawn_with_shell_faults(seed))
