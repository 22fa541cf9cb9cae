"""Membership: which workers exist and are ready, and when new ones start."""

from __future__ import annotations

from collections.abc import Set

from elastic.duties.poison_batches import note_lost_worker
from elastic.duties.uploads import lose_uploads
from elastic.geometry.machine_report import Peer
from elastic.planner.market.ceiling import num_affordable
from elastic.planner.market.exchange import Prices
from elastic.protocol.commands import Command, StartWorkers, StopWorker
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import WorkerRecord
from elastic.protocol.events import WorkerRaised, WorkerReady
from elastic.protocol.notes import Warned
from elastic.protocol.phases import Ending, Forming, Resharding, Running, Waiting
from elastic.protocol.policy import backoff_s

LONG_START_FACTOR = 10
"""So many times more failures end a run in which another worker has been starting for longer."""
MAX_START_FAILURES = 5
"""Value of the policy field `max_start_failures`."""
FIRST_BACKOFF_S = 1.0
"""Value of the policy field `restart_backoff_s`."""
MAX_BACKOFF_S = 60.0
MAX_UNFIT_BACKOFF_S = 600.0
NUM_RECENT_STARTS = 8
MAX_PEERS = 6
NUM_RECENT_CHANGES = 5
"""The mean time between changes is taken over this many."""


def participants(state: ControllerState) -> set[str]:
    """The live workers that take part in the current generation."""
    phase = state.phase
    if isinstance(phase, Forming | Resharding):
        return set(phase.attempt.plan.participants) & state.membership.records.keys()
    return set(state.live.members()) & state.membership.records.keys()


def add_ready_worker(state: ControllerState, now: float, event: WorkerReady) -> list[Command]:
    """A worker has warmed up: it is on standby until an assignment takes it.

    A worker that runs other source code than the driver is rejected before any data reaches it.
    """
    if event.worker not in state.membership.records:
        return []  # its loss was reported first
    if state.membership.digest not in (None, event.digest):
        return _reject_other_sources(state, now, event)
    state.membership.digest = event.digest
    former = state.membership.records[event.worker]
    state.market.pending.pop(event.worker, None)
    start_s = now - former.since
    state.membership.recent_start_s = [
        *state.membership.recent_start_s[1 - NUM_RECENT_STARTS :],
        start_s,
    ]
    worker_record = WorkerRecord(
        now, event.node, event.rack, event.pid, event.memory_bytes, event.device, event.machine
    )
    worker_record.is_ready = True
    worker_record.market = event.market or former.market
    state.membership.records[event.worker] = worker_record
    state.membership.warm.add(event.worker)
    state.membership.ever_ready = True
    state.membership.num_start_failures = 0
    state.membership.no_start_before = 0.0
    if event.node in state.membership.node_drains:
        state.membership.draining.add(event.worker)
        state.membership.node_drains[event.node].draining_workers.add(event.worker)
        return [StopWorker(event.worker, "its node is draining")]
    state.membership.joined_at = now
    if state.growth.standby_since is None:
        state.growth.standby_since = now
    if state.growth.idle_since is None:
        state.growth.idle_since = now
    return []


def forget(
    state: ControllerState, now: float, worker: str, cause: str, outcome: str = "failed"
) -> None:
    """Remove a worker that is gone, with what it held or was writing."""
    if worker not in state.membership.records:
        return
    if worker not in state.membership.warm | state.membership.draining:
        _count_start_failure(state, now, worker, cause, outcome)
    if worker not in state.membership.draining and worker in state.live.members():
        note_change(state, now)
        note_lost_worker(state, worker)
        state.checkpoints.costs.note_failure(state.generation)
    del state.membership.records[worker]
    state.membership.warm.discard(worker)
    state.membership.draining.discard(worker)
    state.checkpoints.late_writers.discard(worker)
    state.market.pending.pop(worker, None)
    state.market.extra.discard(worker)
    for held in state.live.holdings():
        held.holders.discard(worker)
    lose_uploads(state, now, lambda upload: worker in upload.pending)


def drain_for_good(
    state: ControllerState, worker: str, cause: str = "it was drained"
) -> list[Command]:
    """Drain one worker, also if its node stays or its part of a checkpoint arrives after all."""
    for drain in state.membership.node_drains.values():
        drain.draining_workers.discard(worker)
    state.checkpoints.late_writers.discard(worker)
    return drain_workers(state, {worker}, cause)


def drain_workers(
    state: ControllerState, workers: Set[str], cause: str = "it was drained"
) -> list[Command]:
    """Members leave at the next step boundary; workers that are idle and hold no state stop at
    once."""
    state.membership.draining |= workers
    holders = (held.holders for held in state.live.holdings())
    busy = participants(state).union(*holders)
    return [
        StopWorker(worker, cause) for worker in state.membership.records if worker in workers - busy
    ]


def note_change(state: ControllerState, now: float) -> None:
    """Members are lost, or drain; all changes within one generation count as one."""
    if state.membership.changed_generation != state.generation:
        state.membership.changed_generation = state.generation
        state.membership.changes_at = [*state.membership.changes_at[1 - NUM_RECENT_CHANGES :], now]
    state.growth.num_given_back = 0


def start_missing(state: ControllerState, now: float) -> list[Command]:
    """Start workers up to the wanted number.

    None start while survivors recover: the imports of a starting process would slow down their
    first step (measured 0.1 s of 0.2 s on two cores).
    """
    commands = _note_withheld(state)
    if now >= start_deadline(state):
        commands.append(start_workers(state, now, num_to_start(state)))
    return commands


def start_workers(state: ControllerState, now: float, number: int) -> StartWorkers:
    """Start so many workers on machines of the market that is requested now."""
    names = tuple(f"w{state.membership.next_worker + i}" for i in range(number))
    state.membership.next_worker += number
    quarantined, market = tuple(sorted(state.quarantine.until)), state.market.requested
    state.membership.records.update(
        {name: WorkerRecord(now, quarantined=quarantined, market=market) for name in names}
    )
    if market:
        state.market.pending.update(dict.fromkeys(names, now))
    return StartWorkers(names, quarantined, _peers_of_new_workers(state), market)


def _peers_of_new_workers(state: ControllerState) -> tuple[Peer, ...]:
    """Members on different nodes, other ones for each start, so that no link server is crowded."""
    staying = sorted(state.membership.warm - state.membership.draining)
    first = state.membership.next_worker % max(1, len(staying))
    peers: dict[str, Peer] = {}
    for worker in staying[first:] + staying[:first]:
        record = state.membership.records[worker]
        if len(peers) == MAX_PEERS:
            break
        if record.machine.port:
            address = record.machine.host, record.machine.port
            peers.setdefault(record.node, Peer(record.node, record.rack, *address))
    return tuple(peers.values())


def start_deadline(state: ControllerState) -> float:
    """When the back-off before new starts is over; infinite if no worker is missing."""
    if not num_to_start(state):
        return float("inf")
    return max(state.membership.no_start_before, state.gang.no_request_before)


def num_missing(state: ControllerState) -> int:
    """How many workers to start; 0 during a recovery."""
    is_calm = (isinstance(state.phase, Waiting) and not state.phase.is_short) or (
        isinstance(state.phase, Running) and state.phase.num_commits > 0
    )
    return _num_absent(state) if is_calm and not state.ending else 0


def _num_absent(state: ControllerState) -> int:
    num_wanted = state.policy.max_workers - state.growth.num_given_back
    num_staying = len(state.membership.records) - len(state.membership.draining)
    return max(0, num_wanted - (num_staying - len(state.market.extra)))


def num_to_start(state: ControllerState) -> int:
    """The missing workers that `market.max_price_per_hour` allows."""
    return int(min(num_missing(state), num_within_price(state)))


def num_within_price(state: ControllerState) -> float:
    """How many workers may be requested now under `market.max_price_per_hour`."""
    policy = state.policy
    return num_affordable(
        policy.max_price_per_hour,
        Prices.known(policy.spot_price, policy.on_demand_price),
        (record.market for record in state.membership.records.values()),
        state.market.requested,
    )


def _note_withheld(state: ControllerState) -> list[Command]:
    """Warn once while workers are missing that the run may not pay."""
    num_before, absent = state.market.num_withheld, _num_absent(state)
    state.market.num_withheld = int(max(0, absent - num_within_price(state)))
    if not state.market.num_withheld or num_before or state.ending:
        return []
    text = (
        f"{state.market.num_withheld} more workers would cost more than "
        f"market.max_price_per_hour={state.policy.max_price_per_hour:g}: they are not requested"
    )
    return [Warned(state.generation, state.committed_step, "market", text)]


def _reject_other_sources(state: ControllerState, now: float, event: WorkerReady) -> list[Command]:
    """Stop a worker that runs other source code; if none has trained yet, end the run."""
    cause = (
        f"{event.worker} on {event.node} runs other source code than the driver: install the same "
        "working tree on every node, or ship it with `ray job submit --working-dir .`"
    )
    if not state.forming.ever_formed:
        state.ending = Ending("user_error", cause)
    forget(state, now, event.worker, cause)
    return [StopWorker(event.worker, cause)]


def reject_unfit_worker(state: ControllerState, now: float, event: WorkerRaised) -> list[Command]:
    """A new worker's machine lacks something: the run continues with others, unless there are
    none."""
    text = f"{event.worker}: {event.message}"
    forget(state, now, event.worker, event.message, outcome="user_error")
    return [
        Warned(state.generation, state.committed_step, "machine", text),
        StopWorker(event.worker, event.message),
    ]


def back_off(state: ControllerState, now: float, num_unfit: int) -> None:
    """Start no worker for a while, since the next one may get the same machine."""
    pause_s = backoff_s(state.policy.restart_backoff_s, num_unfit, MAX_UNFIT_BACKOFF_S)
    state.membership.no_start_before = max(state.membership.no_start_before, now + pause_s)


def _count_start_failure(
    state: ControllerState, now: float, worker: str, cause: str, outcome: str
) -> None:
    """Back off before the next start; end the run after too many failures without a ready worker.

    Machines on which workers fail at once do not end a run whose other workers are still warming
    up: while some that started no later are, as many failures as there are workers count little.
    """
    state.membership.num_start_failures += 1
    num_failures, policy = state.membership.num_start_failures, state.policy
    pause_s = backoff_s(policy.restart_backoff_s, num_failures, MAX_BACKOFF_S)
    state.membership.no_start_before = now + pause_s
    if state.membership.ever_ready:
        return
    is_unfit = outcome == "user_error"
    since = state.membership.records[worker].since
    others = [record for name, record in state.membership.records.items() if name != worker]
    max_failures = policy.max_start_failures
    if is_unfit or any(record.since <= since for record in others):
        max_failures += policy.max_workers
    if is_unfit and any(record.since < since for record in others):
        max_failures *= LONG_START_FACTOR
    reason = cause if is_unfit else f"workers die while they start: {cause}"
    if num_failures >= max_failures:
        state.ending = Ending(outcome, reason)
