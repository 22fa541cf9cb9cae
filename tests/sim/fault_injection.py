"""Fault injection: what each fault does to the worker that it strikes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sim.controller_restarts import kill_controller
from sim.faults import LATEST_REPORT_S, LONGEST_DELAY_S
from sim.snapshot_server import SimSnapshotServer
from sim.worker import SimWorker
from sim.world import World

from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import (
    LayoutRequested,
    NodeDraining,
    StopRequested,
    StoreLost,
    WorkerDraining,
    WorkerSuspected,
)
from elastic.protocol.snapshot_events import SnapshotServerSuspected


def inflict(world: World, action: str, worker: SimWorker) -> None:
    """Carry out a fault; `action` is one of `sim.faults.ACTIONS`, an exception, or a layout
    request."""
    if act := _ACTIONS.get(action):
        act(world, worker)
    elif action.startswith("raise "):
        worker.control.next_error = action.removeprefix("raise ")
    elif action.startswith("slow by "):
        worker.control.slowness = float(action.removeprefix("slow by "))
    elif action.startswith("request layout "):
        target_layout = TargetLayout.parse(action.removeprefix("request layout "))
        world.post_soon(LayoutRequested(f"request {len(world.struck)}", target_layout))
    else:
        raise KeyError(action)


def _kill(world: World, worker: SimWorker) -> None:
    world.kill(worker, "killed")


def _kill_two(world: World, worker: SimWorker) -> None:
    others = [other for other in world.workers.values() if other is not worker]
    world.kill(worker, "killed")
    if others:
        world.kill(world.random.choice(others), "killed with another")


def _kill_and_report_late(world: World, worker: SimWorker) -> None:
    world.kill(worker, "killed", reported_after_s=world.random.uniform(1.0, LATEST_REPORT_S))


def _freeze(world: World, worker: SimWorker) -> None:
    """Like SIGSTOP. A worker that has not been ready is not probed, so it is left alone."""
    if worker.control.world_rank is not None:
        worker.freeze()
        world.suspect_later(worker)


def _freeze_for_a_while(world: World, worker: SimWorker) -> None:
    """A machine that stalls and recovers, suspected or not."""
    _freeze(world, worker)
    world.timeline.after(world.random.uniform(0.1, 3.0), worker.thaw)


def _hang(world: World, worker: SimWorker) -> None:
    if worker.control.world_rank is not None:
        worker.hang()


def _lose_a_report(world: World, worker: SimWorker) -> None:
    world.links[worker.name].lose_next = True


def _delay_a_report(world: World, worker: SimWorker) -> None:
    world.links[worker.name].next_delay_s = world.random.uniform(0.1, LONGEST_DELAY_S)


def _delay_an_order(world: World, worker: SimWorker) -> None:
    world.links[worker.name].next_order_delay_s = world.random.uniform(0.1, 4.0)


def _go_deaf(world: World, worker: SimWorker) -> None:
    worker.control.deaf = True


def _suspect(world: World, worker: SimWorker) -> None:
    world.post_soon(WorkerSuspected(worker.name, "wrongly"))


def _drain_worker(world: World, worker: SimWorker) -> None:
    world.post_soon(WorkerDraining(worker.name, "it was asked to"))


def _drain(world: World, worker: SimWorker) -> None:
    """A spot notice: the whole node ends in a few seconds."""
    seconds = world.random.uniform(2.0, 6.0)
    world.post_soon(NodeDraining(worker.node, world.timeline.now + seconds), within_s=0.5)
    world.timeline.after(seconds, partial(_take_node, world, worker.node))


def _drain_late(world: World, worker: SimWorker) -> None:
    """A notice long enough to drain: by then no member trains on that node."""
    seconds = world.random.uniform(5.0, 9.0)
    world.post_soon(NodeDraining(worker.node, world.timeline.now + seconds))
    world.timeline.after(seconds, partial(_take_left_node, world, worker.node))


def _drain_soon(world: World, worker: SimWorker) -> None:
    """A notice of a few steps, or less than one."""
    seconds = world.random.uniform(0.01, 0.3)
    world.post_soon(NodeDraining(worker.node, world.timeline.now + seconds))
    world.timeline.after(seconds, partial(_take_node, world, worker.node))


def _drain_in_vain(world: World, worker: SimWorker) -> None:
    """The announced end does not come."""
    seconds = world.random.uniform(0.01, 3.0)
    world.post_soon(NodeDraining(worker.node, world.timeline.now + seconds))


def _take_left_node(world: World, node: str) -> None:
    members = set(world.shell.core.state.live.members())
    late = [w.name for w in world.workers.values() if w.node == node and w.name in members]
    assert not late, f"{late} still train on {node} at its announced end"
    _take_node(world, node)


def _take_node(world: World, node: str) -> None:
    world.checks.note_fault(world.timeline.now)
    world.lose_snapshot_server(node)
    for worker in [w for w in world.workers.values() if w.node == node]:
        world.kill(worker, "its node is gone")


def _kill_node(world: World, worker: SimWorker) -> None:
    _take_node(world, worker.node)


def _kill_snapshot_server(world: World, worker: SimWorker) -> None:
    world.lose_snapshot_server(worker.node)


def _freeze_snapshot_server(world: World, worker: SimWorker) -> None:
    """Like SIGSTOP."""
    snapshot_server = world.around.snapshot_servers.get(worker.node)
    if snapshot_server:
        snapshot_server.is_frozen = True
        _suspect_snapshot_server_later(world, snapshot_server)


def _freeze_snapshot_server_for_a_while(world: World, worker: SimWorker) -> None:
    _freeze_snapshot_server(world, worker)
    snapshot_server = world.around.snapshot_servers.get(worker.node)
    if snapshot_server:
        thaw = partial(setattr, snapshot_server, "is_frozen", False)
        world.timeline.after(world.random.uniform(0.1, 3.0), thaw)


def _suspect_snapshot_server_later(world: World, snapshot_server: SimSnapshotServer) -> None:
    node = snapshot_server.snapshot_server.node

    def suspect() -> None:
        if snapshot_server.is_frozen and world.around.snapshot_servers.get(node) is snapshot_server:
            world.shell.post(SnapshotServerSuspected(node, "no answer to a probe"))
            again = partial(_suspect_snapshot_server_later, world, snapshot_server)
            world.timeline.after(0.0, again)  # once the controller has handled this

    world.timeline.after(world.random.uniform(1.0, 1.6), suspect)


def _lose_the_store(world: World, worker: SimWorker) -> None:
    world.around.store_port = 0
    world.post_soon(StoreLost("its process died"))


def _fill_the_disk(world: World, worker: SimWorker) -> None:
    worker.control.disk_full = True


def _hang_the_write(world: World, worker: SimWorker) -> None:
    """Like a network file system whose server is gone: the current write never returns, and later
    writes wait for it; training continues."""
    worker.control.write_hangs = True


def _damage(world: World, worker: SimWorker) -> None:
    """A bit flips in the newest checkpoint."""
    for saved in world.storage.whole()[-1:]:
        world.storage.damaged.add(saved.path)


def _flap(world: World, worker: SimWorker) -> None:
    """A worker is killed, and its replacements die as they start. Together with the killed one,
    which may still be starting, they are fewer than those that end a run without any ready
    worker."""
    world.num_flaps = world.random.randint(1, world.scenario.policy.max_start_failures - 2)
    world.kill(worker, "killed")


def _stop(world: World, worker: SimWorker) -> None:
    world.post_soon(StopRequested("SIGTERM"))


def _inject_nan(world: World, worker: SimWorker) -> None:
    worker.control.num_nans = 1


def _inject_nans(world: World, worker: SimWorker) -> None:
    worker.control.num_nans = world.random.randint(2, 8)


def _inject_spike(world: World, worker: SimWorker) -> None:
    worker.control.next_loss = world.random.uniform(20.0, 60.0)


def _falsify_checksum(world: World, worker: SimWorker) -> None:
    """Its state is correct, but its checksum is not."""
    worker.control.falsifies_checksum = True


def _slow(world: World, worker: SimWorker) -> None:
    worker.control.slowness = world.random.uniform(3.0, 6.0)


def _break_the_node(world: World, worker: SimWorker) -> None:
    world.nodes.broken.add(worker.node)
    world.kill(worker, "killed")


def _restart(world: World, worker: SimWorker) -> None:
    """The whole job dies and is resumed with another number of workers."""
    min_feasible = world.scenario.target_layout.num_model_ranks
    if world.scenario.memory_bytes:
        min_feasible = 4
    max_workers = world.random.randint(min_feasible, max(min_feasible, 6))
    min_workers = world.random.randint(1, max_workers)
    policy = replace(world.scenario.policy, min_workers=min_workers, max_workers=max_workers)
    world.timeline.after(0.0, partial(world.restart, policy))


def _restart_controller(world: World, worker: SimWorker) -> None:
    """The controller alone dies, and comes back."""
    world.timeline.after(0.0, partial(kill_controller, world))


def _raise_in_core(world: World, worker: SimWorker) -> None:
    """The next event raises once, half-way through."""
    world.shell.raises_in_core = True


def _raise_in_command(world: World, worker: SimWorker) -> None:
    """The next command raises once, before it has an effect."""
    world.shell.raises_in_command = True


def _refuse_logs(world: World, worker: SimWorker) -> None:
    """The disk of journal and metrics is full for a while."""
    until = world.timeline.now + world.random.uniform(0.1, 10.0)
    for log in world.records.logs:
        log.refuses_until = max(log.refuses_until, until)


def _take_lease(world: World, worker: SimWorker) -> None:
    """Another process claims the run, and begins once this one has noticed."""
    for log in world.records.logs:
        log.newest_epoch = world.incarnation + 1


_ACTIONS: dict[str, Callable[[World, SimWorker], None]] = {
    "kill": _kill,
    "kill two": _kill_two,
    "kill and report late": _kill_and_report_late,
    "freeze": _freeze,
    "freeze for a while": _freeze_for_a_while,
    "hang": _hang,
    "lose a report": _lose_a_report,
    "delay a report": _delay_a_report,
    "delay an order": _delay_an_order,
    "go deaf": _go_deaf,
    "suspect": _suspect,
    "drain a worker": _drain_worker,
    "drain": _drain,
    "drain late": _drain_late,
    "drain soon": _drain_soon,
    "drain in vain": _drain_in_vain,
    "kill the node": _kill_node,
    "kill the snapshot server": _kill_snapshot_server,
    "freeze the snapshot server": _freeze_snapshot_server,
    "freeze the snapshot server for a while": _freeze_snapshot_server_for_a_while,
    "lose the store": _lose_the_store,
    "fill the disk": _fill_the_disk,
    "hang the write": _hang_the_write,
    "damage a checkpoint": _damage,
    "flap": _flap,
    "stop": _stop,
    "nan": _inject_nan,
    "nans": _inject_nans,
    "spike": _inject_spike,
    "falsify a checksum": _falsify_checksum,
    "slow": _slow,
    "break the node": _break_the_node,
    "raise in the core": _raise_in_core,
    "raise in a command": _raise_in_command,
    "refuse the logs": _refuse_logs,
    "take the lease": _take_lease,
    "restart": _restart,
    "restart the controller": _restart_controller,
}
