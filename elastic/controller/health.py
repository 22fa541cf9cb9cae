"""Health: machines that are broken, or far slower than the others, get no worker.

A worker checks its machine before it joins (`actors.health`); if a check fails it never becomes
ready. What only a comparison shows is decided here: a device much slower than others of its kind,
links much slower than those of other workers, two workers on one GPU. Such a worker leaves at the
next step boundary as long as enough stay, and its node is quarantined, so that its replacement
starts elsewhere. The same happens to a member whose device reports errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from elastic.duties.bandwidth import link_class
from elastic.duties.membership import drain_workers, reject_unfit_worker
from elastic.duties.quarantine import quarantine_unfit_node
from elastic.protocol.commands import Command, Warned
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import WorkerDraining, WorkerRaised

LEAST_OTHERS = 2
"""One other device may itself be the odd one."""
MOST_SLOW = 1 / 3
"""If the links of more workers are slow, that is how this network is."""


def on_failed_check(state: ControllerState, now: float, event: WorkerRaised) -> list[Command]:
    """A new worker's machine failed its check: the next worker starts elsewhere, if possible."""
    commands = quarantine_unfit_node(state, now, event.node, event.message)
    return commands + reject_unfit_worker(state, now, event)


def on_degraded(state: ControllerState, now: float, event: WorkerDraining) -> list[Command]:
    """A worker's device reports errors while it trains."""
    if event.worker not in state.membership.records:
        return []
    return _remove(state, now, event.worker, event.cause)


def compare_devices(state: ControllerState, now: float) -> list[Command]:
    """Compare the devices of the workers that have become ready since the last generation with
    those of all that stay."""
    records = {worker: state.membership.records[worker] for worker in state.membership.staying()}
    first_with: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    for worker, record in sorted(records.items(), key=lambda item: not item[1].is_compared):
        first_with.setdefault(record.machine.device_id, worker)
        times.setdefault(record.machine.processor, []).append(record.machine.product_s)
    typical_s = {
        name: median(of_kind) for name, of_kind in times.items() if len(of_kind) > LEAST_OTHERS
    }
    factor = state.policy.health_factor
    commands: list[Command] = []
    for worker, record in records.items():
        machine, other = record.machine, first_with[record.machine.device_id]
        is_new, record.is_compared = not record.is_compared, True
        usual_s = typical_s.get(machine.processor, 0.0)
        if is_new and machine.device_id and other != worker:
            cause = f"{other} has the same GPU ({machine.device_id}); see CUDA_VISIBLE_DEVICES"
            commands += _remove(state, now, worker, cause)
        elif is_new and factor and usual_s and machine.product_s > factor * usual_s:
            ratio = machine.product_s / usual_s
            cause = f"its device takes {ratio:.1f} times as long for a matrix product as others"
            commands += _remove(state, now, worker, cause)
    return commands


def compare_links(
    state: ControllerState, now: float, links: Sequence[tuple[str, str, float]]
) -> list[Command]:
    """Find workers with slow links, from (receiver, sender, bytes a second).

    A link is slow if a quarter of the links of its class are `health_factor` times as fast. A link
    has two ends: a worker is to blame only if all its links of a class are slow. If many workers
    are, the network is to blame.
    """
    by_class: dict[str, list[tuple[str, str, float]]] = {}
    for receiver, sender, speed in links if state.policy.health_factor else ():
        records = state.membership.records
        name = link_class(records[receiver].place, records[sender].place)
        by_class.setdefault(name, []).append((receiver, sender, speed))
    causes: dict[str, str] = {}
    for of_class in by_class.values():
        fast = sorted(speed for _, _, speed in of_class)[len(of_class) * 3 // 4]
        fastest: dict[str, float] = {}
        others: dict[str, set[str]] = {}
        for receiver, sender, speed in of_class:
            for worker, other in ((receiver, sender), (sender, receiver)):
                fastest[worker] = max(speed, fastest.get(worker, 0.0))
                others.setdefault(worker, set()).add(other)
        slow = [
            worker
            for worker, speed in sorted(fastest.items())
            if len(others[worker]) >= LEAST_OTHERS and speed * state.policy.health_factor < fast
        ]
        for worker in slow if len(slow) <= len(fastest) * MOST_SLOW else ():
            speeds = f"{fastest[worker] / 1e6:.0f} MB/s, those of others reach {fast / 1e6:.0f}"
            causes[worker] = f"none of its links is faster than {speeds}"
    commands: list[Command] = []
    for worker, cause in causes.items():
        commands += _remove(state, now, worker, cause)
    return commands


def _remove(state: ControllerState, now: float, worker: str, cause: str) -> list[Command]:
    """Drain a worker as long as enough stay, and quarantine its node."""
    node = state.membership.records[worker].node
    is_enough = state.membership.num_staying() > state.policy.min_workers
    is_new = worker not in state.membership.draining
    end = "it leaves the run" if is_enough else "it stays, since the run has no other worker"
    text = f"{worker} on {node}: {cause}; {end}"
    commands: list[Command] = [Warned(state.generation, state.committed_step, "health", text)]
    commands += quarantine_unfit_node(state, now, node, f"{worker}: {cause}")
    if is_enough and is_new:
        commands += drain_workers(state, {worker})
    return commands
