"""Health: machines that are broken, or far slower than the others, get no rank.

A worker checks its machine before it joins (`actors.health`); if a check fails it never becomes
ready. What only a comparison shows is decided here: a device much slower than others of its kind,
links much slower than those of other workers, two workers on one GPU. Such a worker leaves at the
next step boundary if the run can go on without it, and its node is quarantined, so that its
replacement starts elsewhere. The same happens to a member whose device reports errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from elastic.duties.bandwidth import link_class
from elastic.duties.membership import back_off, drain_for_good, reject_unfit_worker
from elastic.duties.quarantine import quarantine_unfit_node
from elastic.protocol.commands import Command
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import UsualMachines
from elastic.protocol.events import WorkerDraining, WorkerRaised
from elastic.protocol.notes import Warned

CanTrain = Callable[[], bool]
"""Whether a layout fits the workers that stay."""
LEAST_OTHERS = 2
"""One other device may itself be the odd one."""
SLOW_NODES = 1 / 20
"""If the links of more nodes than one and this share are slow, that is how this network is."""


def on_failed_check(state: ControllerState, now: float, event: WorkerRaised) -> list[Command]:
    """A new worker's machine failed its check: the next worker starts elsewhere, if possible."""
    commands = quarantine_unfit_node(state, now, event.node, event.message)
    return commands + reject_unfit_worker(state, now, event)


def on_degraded(
    state: ControllerState, now: float, event: WorkerDraining, can_train: CanTrain
) -> list[Command]:
    """A worker's device reports errors while it trains."""
    membership = state.membership
    if event.worker not in membership.records or event.worker in membership.draining:
        return []
    return _remove(state, now, event.worker, event.cause, True, can_train)


def compare_new_device(
    state: ControllerState, now: float, worker: str, can_train: CanTrain
) -> list[Command]:
    """Compare the device of a worker that has become ready after the first generation, before the
    run pauses for it."""
    membership, usual = state.membership, state.membership.usual
    is_joining = worker in membership.warm and worker not in membership.draining
    if not state.forming.ever_formed or not is_joining:
        return []
    unfit = _compared(state, usual, worker)
    usual.num_unfit = usual.num_unfit + 1 if unfit else 0
    commands = _remove(state, now, worker, *unfit, can_train) if unfit else []
    if worker not in membership.draining:
        device_id = membership.records[worker].machine.device_id
        if device_id and usual.worker_by_device.get(device_id) not in membership.records:
            usual.worker_by_device[device_id] = worker  # another may follow before the next group
    return commands


def compare_devices(state: ControllerState, now: float, can_train: CanTrain) -> list[Command]:
    """Before a generation forms, note what is usual, and compare the devices of the first one."""
    usual = UsualMachines(num_unfit=state.membership.usual.num_unfit)
    staying = sorted(state.membership.warm - state.membership.draining)
    times: dict[str, list[float]] = {}
    for worker in staying:
        machine = state.membership.records[worker].machine
        if machine.product_s:
            times.setdefault(machine.processor, []).append(machine.product_s)
        if machine.device_id:
            usual.worker_by_device.setdefault(machine.device_id, worker)
    usual.product_s = {n: median(own) for n, own in times.items() if len(own) > LEAST_OTHERS}
    state.membership.usual = usual
    commands: list[Command] = []
    for worker in () if state.forming.ever_formed else staying:
        if unfit := _compared(state, usual, worker):
            commands += _remove(state, now, worker, *unfit, can_train)
    return commands


def compare_links(
    state: ControllerState,
    now: float,
    links: Sequence[tuple[str, str, float]],
    can_train: CanTrain,
) -> list[Command]:
    """Find workers with slow links, from (receiver, sender, bytes a second).

    A link is slow if a quarter of the links between equal machines as near to each other are
    `health_factor` times as fast. A link has two ends: a worker is to blame only if all such links
    of it are slow. If those of many nodes are, the network is to blame.
    """
    records = state.membership.records
    by_class: dict[tuple[str, ...], list[tuple[str, str, float]]] = {}
    for receiver, sender, speed in links if state.policy.health_factor else ():
        ends = records[receiver], records[sender]
        name = link_class(ends[0].place, ends[1].place)
        processors = sorted(end.machine.processor for end in ends)
        by_class.setdefault((name, *processors), []).append((receiver, sender, speed))
    causes: dict[str, str] = {}
    for of_class in by_class.values():
        causes |= _slow_workers(state, of_class)
    commands: list[Command] = []
    for worker, cause in causes.items():
        commands += _remove(state, now, worker, cause, True, can_train)
    return commands


def _slow_workers(
    state: ControllerState, links: Sequence[tuple[str, str, float]]
) -> dict[str, str]:
    """Workers all of whose links are slow, and why, from the links of one class."""
    fast = sorted(speed for _, _, speed in links)[len(links) * 3 // 4]
    fastest: dict[str, float] = {}
    others: dict[str, set[str]] = {}
    for receiver, sender, speed in links:
        for worker, other in ((receiver, sender), (sender, receiver)):
            fastest[worker] = max(speed, fastest.get(worker, 0.0))
            others.setdefault(worker, set()).add(other)
    slow = [
        worker
        for worker, speed in sorted(fastest.items())
        if len(others[worker]) >= LEAST_OTHERS and speed * state.policy.health_factor < fast
    ]
    nodes = {state.membership.records[worker].node for worker in fastest}
    slow_nodes = {state.membership.records[worker].node for worker in slow}
    if len(slow_nodes) > max(1, SLOW_NODES * len(nodes)):
        return {}
    return {
        worker: f"none of its links is faster than {fastest[worker] / 1e6:.0f} MB/s, those of "
        f"others reach {fast / 1e6:.0f} MB/s (health.slow_factor={state.policy.health_factor:g})"
        for worker in slow
    }


class UnfitDevice(NamedTuple):
    """Why a worker gets no rank, and whether another one on its node would be no better."""

    cause: str
    blames_node: bool = True


def _compared(state: ControllerState, usual: UsualMachines, worker: str) -> UnfitDevice | None:
    """Compare a worker's device with what the last generation had; None if it is fit."""
    machine, factor = state.membership.records[worker].machine, state.policy.health_factor
    other = usual.worker_by_device.get(machine.device_id, worker)
    if machine.device_id and other != worker and other in state.membership.records:
        cause = f"{other} has the same GPU ({machine.device_id}); see CUDA_VISIBLE_DEVICES"
        return UnfitDevice(cause, blames_node=False)
    usual_s = usual.product_s.get(machine.processor, 0.0)
    if not factor or not usual_s or machine.product_s <= factor * usual_s:
        return None
    ratio = machine.product_s / usual_s
    return UnfitDevice(
        f"its device takes {ratio:.1f} times as long for a matrix product as others of its kind "
        f"(health.slow_factor={factor:g})"
    )


def _remove(
    state: ControllerState,
    now: float,
    worker: str,
    cause: str,
    blames_node: bool,
    can_train: CanTrain,
) -> list[Command]:
    """Drain a worker if the run can train without it, and quarantine its node if that is to
    blame."""
    node = state.membership.records[worker].node
    was_draining = worker in state.membership.draining
    state.membership.draining.add(worker)
    is_enough = state.membership.num_staying() >= state.policy.min_workers
    leaves = is_enough and not state.ending and can_train()
    end = "it leaves the run" if leaves else "it stays, since the run needs it"
    text = f"{worker} on {node}: {cause}; {end}"
    commands: list[Command] = [Warned(state.generation, state.committed_step, "health", text)]
    if blames_node:
        commands += quarantine_unfit_node(state, now, node, f"{worker}: {cause}")
    if not leaves:
        if not was_draining:
            state.membership.draining.discard(worker)
        return commands
    back_off(state, now, max(1, state.membership.usual.num_unfit))
    return commands + drain_for_good(state, worker, cause)
