"""What each fault does to the worker that it strikes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sim.controller_restarts import kill_controller
from sim.snapshot_server import SimKeeper
from sim.worker import SimWorker
from sim.world import World

from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import (
    LayoutRequested,
    NodeDraining,
    SnapshotServerSuspected,
    StopRequested,
    StoreLost,
    WorkerDraining,
    WorkerSuspected,
)


def inflict(world: World, action: str, worker: SimWorker) -> None:
    """Do what a fault says; `action` is one of `sim.faults.ACTIONS`, or a wish for a layout."""
    if action.startswith("raise "):
        worker.control.next_error = action.removeprefix("raise ")
    elif action.startswith("relayout "):
        target_layout = TargetLayout.parse(action.removeprefix("relayout "))
        world.post_soon(LayoutRequested(f"request {len(world.happened)}", target_layout))
    else:
        _DOINGS[action](world, worker)


def _kill(world: World, worker: SimWorker) -> None:
    world.kill(worker, "killed")


def _kill_two(world: World, worker: SimWorker) -> None:
    others = [other for other in world.workers.values() if other is not worker]
    world.kill(worker, "killed")
    if others:
        world.kill(world.random.choice(others), "killed with another")


def _kill_and_tell_late(world: World, worker: SimWorker) -> None:
    world.kill(worker, "killed", told_after_s=world.random.uniform(1.0, 3.0))


def _freeze(world: World, worker: SimWorker) -> None:
    """As SIGSTOP. Nobody would ever look for one who has not been ready."""
    if worker.control.world_rank is not None:
        worker.freeze()
        world.suspect_later(worker)


def _freeze_for_a_while(world: World, worker: SimWorker) -> None:
    """A machine that stands still and comes back, suspected or not."""
    _freeze(world, worker)
    world.timeline.after(world.random.uniform(0.1, 3.0), worker.thaw)


def _hang(world: World, worker: SimWorker) -> None:
    if worker.control.world_rank is not None:
        worker.hang()


def _lose_a_report(world: World, worker: SimWorker) -> None:
    world.bandwidths[worker.name].lose_next = True


def _delay_a_report(world: World, worker: SimWorker) -> None:
    world.bandwidths[worker.name].next_delay_s = world.random.uniform(0.1, 8.0)


def _delay_an_order(world: World, worker: SimWorker) -> None:
    world.bandwidths[worker.name].next_order_delay_s = world.random.uniform(0.1, 4.0)


def _go_deaf(world: World, worker: SimWorker) -> None:
    worker.control.deaf = True


def _suspect(world: World, worker: SimWorker) -> None:
    world.post_soon(WorkerSuspected(worker.name, "wrongly"))


def _leave(world: World, worker: SimWorker) -> None:
    world.post_soon(WorkerDraining(worker.name, "it was asked to"))


def _drain(world: World, worker: SimWorker) -> None:
    """A spot notice: the whole node goes, in a few seconds."""
    seconds = world.random.uniform(2.0, 6.0)
    world.post_soon(NodeDraining(worker.node, world.timeline.now + seconds), within_s=0.5)
    world.timeline.after(seconds, partial(_take_node, world, worker.node))


def _drain_late(world: World, worker: SimWorker) -> None:
    """A notice long enough to leave: whoever trains is gone from there by then."""
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
    members = set(world.shell.core.state.members())
    late = [w.name for w in world.workers.values() if w.node == node and w.name in members]
    assert not late, f"{late} still train on {node} at its announced end"
    _take_node(world, node)


def _take_node(world: World, node: str) -> None:
    world.checks.note_fault(world.timeline.now)
    world.lose_keeper(node)
    for worker in [w for w in world.workers.values() if w.node == node]:
        world.kill(worker, "its node is gone")


def _kill_node(world: World, worker: SimWorker) -> None:
    _take_node(world, worker.node)


def _kill_keeper(world: World, worker: SimWorker) -> None:
    world.lose_keeper(worker.node)


def _freeze_keeper(world: World, worker: SimWorker) -> None:
    """As SIGSTOP."""
    snapshot_server = world.around.snapshot_servers.get(worker.node)
    if snapshot_server:
        snapshot_server.is_frozen = True
        _suspect_keeper_later(world, snapshot_server)


def _freeze_keeper_for_a_while(world: World, worker: SimWorker) -> None:
    _freeze_keeper(world, worker)
    snapshot_server = world.around.snapshot_servers.get(worker.node)
    if snapshot_server:
        thaw = partial(setattr, snapshot_server, "is_frozen", False)
        world.timeline.after(world.random.uniform(0.1, 3.0), thaw)


def _suspect_keeper_later(world: World, snapshot_server: SimKeeper) -> None:
    node = snapshot_server.snapshot_server.node

    def suspect() -> None:
        if snapshot_server.is_frozen and world.around.snapshot_servers.get(node) is snapshot_server:
            world.shell.post(SnapshotServerSuspected(node, "no answer to a probe"))
            _suspect_keeper_later(world, snapshot_server)

    world.timeline.after(world.random.uniform(1.0, 1.6), suspect)


def _lose_the_store(world: World, worker: SimWorker) -> None:
    world.around.store_port = 0
    world.post_soon(StoreLost("its process died"))


def _fill_the_disk(world: World, worker: SimWorker) -> None:
    worker.control.disk_full = True


def _hang_the_write(world: World, worker: SimWorker) -> None:
    """As a network file system whose server is gone: the write under way never returns, and those
    after it wait for it; training goes on."""
    worker.control.write_hangs = True


def _damage(world: World, worker: SimWorker) -> None:
    """A bit flips in the newest checkpoint."""
    for saved in world.storage.whole()[-1:]:
        world.storage.damaged.add(saved.path)


def _flap(world: World, worker: SimWorker) -> None:
    """Killed, and its replacements die as they start: with it, which may be starting itself, fewer
    than end a run that has had no worker yet."""
    world.num_flaps = world.random.randint(1, world.scenario.policy.max_start_failures - 2)
    world.kill(worker, "killed")


def _stop(world: World, worker: SimWorker) -> None:
    world.post_soon(StopRequested("SIGTERM"))


def _tell_nan(world: World, worker: SimWorker) -> None:
    worker.control.num_nans = 1


def _tell_nans(world: World, worker: SimWorker) -> None:
    worker.control.num_nans = world.random.randint(2, 8)


def _tell_spike(world: World, worker: SimWorker) -> None:
    worker.control.next_loss = world.random.uniform(20.0, 60.0)


def _lie(world: World, worker: SimWorker) -> None:
    """Its state is as it should be, and its checksum is not."""
    worker.control.lies = True


def _slow(world: World, worker: SimWorker) -> None:
    worker.control.slowness = world.random.uniform(3.0, 6.0)


def _spoil_the_node(world: World, worker: SimWorker) -> None:
    world.nodes.spoilt.add(worker.node)
    world.kill(worker, "killed")


def _restart(world: World, worker: SimWorker) -> None:
    """The whole job dies and is begun anew, with another number of workers."""
    least = world.scenario.target_layout.num_model_ranks
    if world.scenario.memory_bytes:
        least = 4
    max_workers = world.random.randint(least, max(least, 6))
    min_workers = world.random.randint(1, max_workers)
    policy = replace(world.scenario.policy, min_workers=min_workers, max_workers=max_workers)
    world.timeline.after(0.0, partial(world.restart, policy))


def _restart_controller(world: World, worker: SimWorker) -> None:
    """It alone dies, and comes back."""
    world.timeline.after(0.0, partial(kill_controller, world))


_DOINGS: dict[str, Callable[[World, SimWorker], None]] = {
    "kill": _kill,
    "kill two": _kill_two,
    "kill and tell late": _kill_and_tell_late,
    "freeze": _freeze,
    "freeze for a while": _freeze_for_a_while,
    "hang": _hang,
    "lose a report": _lose_a_report,
    "delay a report": _delay_a_report,
    "delay an order": _delay_an_order,
    "go deaf": _go_deaf,
    "suspect": _suspect,
    "leave": _leave,
    "drain": _drain,
    "drain late": _drain_late,
    "drain soon": _drain_soon,
    "drain in vain": _drain_in_vain,
    "kill the node": _kill_node,
    "kill the keeper": _kill_keeper,
    "freeze the keeper": _freeze_keeper,
    "freeze the keeper for a while": _freeze_keeper_for_a_while,
    "lose the store": _lose_the_store,
    "fill the disk": _fill_the_disk,
    "hang the write": _hang_the_write,
    "damage a checkpoint": _damage,
    "flap": _flap,
    "stop": _stop,
    "nan": _tell_nan,
    "nans": _tell_nans,
    "spike": _tell_spike,
    "lie": _lie,
    "slow": _slow,
    "spoil the node": _spoil_the_node,
    "restart": _restart,
    "restart the controller": _restart_controller,
}
