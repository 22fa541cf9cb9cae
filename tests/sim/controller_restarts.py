"""Death and restart of the controller alone, as on Ray."""

from __future__ import annotations

from functools import partial

from sim.shell import Death, replay_whole
from sim.timeline import Channel
from sim.world import World

from elastic.protocol.commands import StartSnapshotServer, StartStore
from elastic.protocol.controller_events import ControllerRestarted
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import (
    SnapshotServerLost,
    SnapshotServerReady,
    StoreLost,
    StoreReady,
    WorkerLost,
)

GONE = "it died while the controller was down"


def kill_controller(world: World) -> None:
    """The controller dies during its next event or at once, and is back a little later."""
    absence_s = world.random.uniform(*world.scenario.absence_s)
    dead = world.shell

    def come_back() -> None:
        if world.shell is dead:
            _come_back(world)

    def die() -> None:
        world.checks.note_fault(world.timeline.now + absence_s)
        for link in world.links.values():
            link.loses_older = world.random.random() < 0.5
        world.timeline.after(absence_s, come_back)

    if world.random.random() < 0.5:
        num_lines, num_commands = world.random.randint(0, 5), world.random.randint(0, 4)
        dead.die_at_next_event(Death(num_lines, num_commands, die))
    elif dead.outcome is None:
        dead.close()
        die()


def _come_back(world: World) -> None:
    world.incarnation += 1
    world.around.incarnation = world.incarnation
    before = replay_whole(world.records)
    state, to_repeat = before.core.state, before.again()
    world.checks.note_restart(state.committed_step)
    world.shell = world.shell_of(before.core, before)
    if before.stopped:
        world.shell.outcome = before.stopped
        world.shell.close()
        return
    worker_records = {
        name: name in state.membership.warm for name in sorted(state.membership.records)
    }
    quarantined = {
        name: worker_record.quarantined for name, worker_record in state.membership.records.items()
    }
    committed_step = state.committed_step
    world.shell.post(ControllerRestarted(world.incarnation, before.now))
    _deliver_late(world)
    _find_store(world, state)
    _find_snapshot_servers(world, state)
    _find_workers(world, worker_records, quarantined, committed_step)
    for command in to_repeat:
        world.carry_out(command)


def _deliver_late(world: World) -> None:
    """Reports to the dead controller may arrive before, during or after those to the new one."""
    for link in world.links.values():
        link.down = Channel(world.timeline)
    undelivered, world.undelivered = world.undelivered, []
    delay_s = world.random.uniform(0.0, 0.01)
    for arrive in undelivered:
        world.timeline.after(delay_s, arrive)


def _find_store(world: World, state: ControllerState) -> None:
    if world.around.store_port:
        world.shell.post(StoreReady("host", world.around.store_port))
    elif state.store.port:
        world.shell.post(StoreLost(GONE))
    else:
        world.carry_out(StartStore())


def _find_snapshot_servers(world: World, state: ControllerState) -> None:
    for node in sorted(state.snapshots.servers.keys() | state.snapshots.starting):
        if node in world.around.snapshot_servers:
            world.shell.post(
                SnapshotServerReady(world.around.snapshot_servers[node].snapshot_server)
            )
        elif node in state.snapshots.servers:
            world.shell.post(SnapshotServerLost(node, GONE))
        else:
            world.carry_out(StartSnapshotServer(node))


def _find_workers(
    world: World,
    worker_records: dict[str, bool],
    quarantined: dict[str, tuple[str, ...]],
    committed_step: int,
) -> None:
    """`worker_records` says of each worker whether it had been warm."""
    for unknown in world.nodes.waiting.keys() - worker_records.keys():
        del world.nodes.waiting[unknown]
    for unknown in [w for name, w in world.workers.items() if name not in worker_records]:
        world.kill(unknown, "the controller does not know it")
    for name, was_warm in worker_records.items():
        worker = world.workers.get(name)
        if worker:
            meet = partial(worker.meet, world.incarnation, committed_step)
            world.links[name].down.send(world.latency_s(), meet)
            if worker.control.frozen:
                world.suspect_later(worker)
        elif was_warm:
            world.post_soon(WorkerLost(name, GONE))
        elif name not in world.nodes.waiting:
            world.start_worker(name, quarantined[name])
