"""The real core in a world of crashes, hangs, losses and restarts; invariants after each event.

Seeds are new with each commit. A run that fails tells its seed, how to replay it, its faults and
what happened last; continuous integration keeps the seed in `kept_seeds.txt`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim.fresh_seeds import SOAK, FreshSeeds
from sim.hung_writes import drawn_with_hung_writes, drawn_with_one_hung_write
from sim.scenario import (
    drawn,
    drawn_with_bad_numbers,
    drawn_with_controller_restarts,
    drawn_with_drains,
    drawn_with_frozen_keepers,
    drawn_with_long_absences,
    drawn_with_long_notices,
    drawn_with_parities,
    drawn_with_relayouts,
    drawn_with_scarcity,
    drawn_with_slow_workers,
    drawn_with_snapshots,
    drawn_with_spoilt_nodes,
    drawn_with_storage_faults,
    drawn_with_watching_and_restarts,
)
from sim.seeds import KEPT, KEPT_CONTROLLER, KEPT_DRAINS, KEPT_PARITIES, KEPT_WITH_BAD_NUMBERS
from sim.simulation import simulate

from elastic.protocol.commands import Abort, Reshard, RolledBack, StopWorker
from elastic.protocol.events import Checkpointed
from elastic.protocol.step_records import NUM_KEPT_RECORDS

NUM_SEEDS = 600
NUM_SEEDS_RELAYOUTS = 250
NUM_SEEDS_SNAPSHOTS = 150
NUM_SEEDS_PARITIES = 200
NUM_SEEDS_FROZEN = 100
NUM_SEEDS_SCARCE = 100
NUM_SEEDS_STORAGE = 100
NUM_SEEDS_NUMBERS = 100
NUM_SEEDS_CONTROLLER = 200
NUM_SEEDS_ALONE = 150
NUM_SEEDS_ABSENT = 40
NUM_SEEDS_DRAINS = 150
NUM_SEEDS_NOTICES = 50
NUM_SEEDS_LEAVING = 400
NUM_SEEDS_STRAGGLERS = 100
NUM_SEEDS_SPOILT = 100
NUM_SEEDS_HUNG = 100
NUM_SEEDS_ONE_HUNG = 40
NUM_SEEDS_SOAK = 12_000


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 50))
def test_runs_survive_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_RELAYOUTS, 50))
def test_layouts_change_among_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_relayouts(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_SNAPSHOTS, 50))
def test_snapshots_are_taken_among_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_snapshots(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_PARITIES, 50))
def test_parities_are_kept_among_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_parities(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_FROZEN, 50))
def test_keepers_stand_still_among_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_frozen_keepers(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_SCARCE, 50))
def test_workers_are_scarce_among_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_scarcity(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_STORAGE, 50))
def test_checkpoints_are_written_among_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_storage_faults(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_NUMBERS, 50))
def test_numbers_go_bad_among_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_bad_numbers(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_DRAINS, 50))
def test_nodes_announce_their_end_among_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_drains(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_NOTICES, 25))
def test_a_node_that_says_in_time_that_it_will_be_gone_costs_nothing(
    first: int, fresh_seeds: FreshSeeds
) -> None:
    """Nobody trains there any more by then, nothing is broken off and no step is redone."""
    for seed in fresh_seeds(first, 25):
        world = simulate(drawn_with_long_notices(seed))
        told = [command for _, _, commands, _ in world.records.trace for command in commands]
        harm = [command for command in told if isinstance(command, Abort | RolledBack)]
        assert not harm, f"seed {seed}: {harm}"
        assert world.shell.outcome and world.shell.outcome.outcome == "completed"


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_LEAVING, 100))
def test_workers_that_come_and_go_cost_no_evaluation(first: int, fresh_seeds: FreshSeeds) -> None:
    """Not that of the last step either, at which the run is asked to pause now and then."""
    for seed in fresh_seeds(first, 100):
        scenario = drawn(seed)
        draining = [fault for fault in scenario.faults if fault.action == "leave"]
        world = simulate(replace(scenario, eval_every=1, faults=draining))
        state = world.shell.core.state
        assert state.evaluated_step == state.job.steps, f"seed {seed}"


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_HUNG, 50))
def test_writes_never_return_among_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_hung_writes(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_ONE_HUNG, 20))
def test_a_write_that_never_returns_delays_checkpoints_and_costs_no_step(
    first: int, fresh_seeds: FreshSeeds
) -> None:
    """The next is whole as soon as another worker has taken the place of the one that hangs."""
    for seed in fresh_seeds(first, 20):
        scenario = drawn_with_one_hung_write(seed)
        world = simulate(scenario)
        trace = world.records.trace
        whole_at = [now for now, event, _, _ in trace if isinstance(event, Checkpointed)]
        [(hung_at, _, _)] = world.happened
        delay_s = min(at for at in whole_at if at > hung_at) - hung_at
        policy = scenario.policy
        assert delay_s < policy.save_timeout_s + policy.start_timeout_s, f"seed {seed}: {delay_s}"
        told = [command for _, _, commands, _ in trace for command in commands]
        harm = [command for command in told if isinstance(command, Abort | RolledBack)]
        assert not harm, f"seed {seed}: {harm}"
        assert world.shell.outcome and world.shell.outcome.outcome == "completed"


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_STRAGGLERS, 50))
def test_workers_turn_slow_among_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_slow_workers(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_STRAGGLERS, 50))
def test_a_slow_worker_costs_nothing_but_its_time(first: int, fresh_seeds: FreshSeeds) -> None:
    """It leaves by plan: nobody is aborted and no step is redone."""
    for seed in fresh_seeds(first, 50):
        scenario = drawn_with_slow_workers(seed)
        slow = [fault for fault in scenario.faults if fault.action == "slow"]
        world = simulate(replace(scenario, faults=slow))
        told = [command for _, _, commands, _ in world.records.trace for command in commands]
        harm = [command for command in told if isinstance(command, Abort | RolledBack)]
        assert not harm, f"seed {seed}: {harm}"
        assert world.shell.outcome and world.shell.outcome.outcome == "completed"


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_SPOILT, 50))
def test_nodes_are_spoilt_among_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_spoilt_nodes(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_SPOILT, 50))
def test_what_is_watched_outlives_controllers(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_watching_and_restarts(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_CONTROLLER, 50))
def test_controllers_die_among_what_is_drawn(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 50):
        simulate(drawn_with_controller_restarts(seed))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_ALONE, 50))
def test_a_controller_that_dies_alone_costs_nothing(first: int, fresh_seeds: FreshSeeds) -> None:
    """Nobody is aborted, ended or started anew for it, and no step is redone."""
    for seed in fresh_seeds(first, 50):
        scenario = drawn_with_controller_restarts(seed)
        alone = [f for f in scenario.faults if f.action == "restart the controller"]
        # Whoever has got an order waits in its collective for those that have not.
        policy = replace(scenario.policy, collective_timeout_s=10.0)
        world = simulate(replace(scenario, policy=policy, faults=alone))
        told = [command for _, _, commands, _ in world.records.trace for command in commands]
        harm = [c for c in told if isinstance(c, Abort | StopWorker | RolledBack)]
        assert not harm, f"seed {seed}: {harm}"
        assert world.shell.outcome and world.shell.outcome.outcome == "completed"


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_ABSENT, 20))
def test_controllers_are_away_longer_than_buffers_last(first: int, fresh_seeds: FreshSeeds) -> None:
    """No tensors are relabelled (invariant 8), and a step that any worker has the record of has
    its numbers in the metrics."""
    for seed in fresh_seeds(first, 20):
        scenario = drawn_with_long_absences(seed)
        world = simulate(scenario)
        told = [command for _, _, commands, _ in world.records.trace for command in commands]
        is_live = all(c.source in ("live", "initial") for c in told if isinstance(c, Reshard))
        if is_live and scenario.num_kept_records == NUM_KEPT_RECORDS:
            missing = [line.record.step for line in world.records.metrics if line.record.missing]
            assert not missing, f"seed {seed}: {missing}"


@pytest.mark.parametrize("seed", KEPT)
def test_what_was_found_once_is_not_found_again(seed: int) -> None:
    simulate(drawn(seed))


@pytest.mark.parametrize("seed", KEPT_WITH_BAD_NUMBERS)
def test_what_was_found_among_bad_numbers_is_not_found_again(seed: int) -> None:
    simulate(drawn_with_bad_numbers(seed))


@pytest.mark.parametrize("seed", KEPT_DRAINS)
def test_what_was_found_among_notices_is_not_found_again(seed: int) -> None:
    simulate(drawn_with_drains(seed))


@pytest.mark.parametrize("seed", KEPT_PARITIES)
def test_what_was_found_with_parities_is_not_found_again(seed: int) -> None:
    simulate(drawn_with_parities(seed))


@pytest.mark.parametrize("seed", KEPT_CONTROLLER)
def test_what_a_restart_has_shown_once_is_not_shown_again(seed: int) -> None:
    simulate(drawn_with_controller_restarts(seed))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SOAK, SOAK + NUM_SEEDS_SOAK, 1000))
def test_many_more(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 1000):
        simulate(drawn(seed))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SOAK, SOAK + NUM_SEEDS_SOAK // 3, 1000))
def test_many_more_with_changing_layouts(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 1000):
        simulate(drawn_with_relayouts(seed))


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
def test_many_more_with_nodes_that_announce_their_end(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 1000):
        simulate(drawn_with_drains(seed))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SOAK, SOAK + NUM_SEEDS_SOAK // 2, 1000))
def test_many_more_with_controllers_that_die(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 1000):
        simulate(drawn_with_controller_restarts(seed))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SOAK, SOAK + NUM_SEEDS_SOAK // 6, 200))
def test_many_more_absences_longer_than_buffers_last(first: int, fresh_seeds: FreshSeeds) -> None:
    for seed in fresh_seeds(first, 200):
        simulate(drawn_with_long_absences(seed))
