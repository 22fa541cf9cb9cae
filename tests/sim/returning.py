"""The controller alone dies and comes back, as `actors/shell.py` and `ray_fleet.py` have it."""

from __future__ import annotations

from functools import partial

from sim.shell import Death, replay_whole
from sim.timeline import Channel
from sim.world import World

from elastic.commands import StartKeeper, StartStore
from elastic.controller_events import ControllerRestarted
from elastic.events import (
    KeeperLost,
    KeeperReady,
    StoreLost,
    StoreReady,
    WorkerLost,
)
from elastic.state import CoreState

GONE = "it died while nobody looked"


def kill_controller(world: World) -> None:
    """It dies amid its next event or at once, and is back a little later."""
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
    state, again = before.core.state, before.again()
    world.checks.note_restart(state.committed_step)
    world.shell = world.shell_of(before.core, before)
    if before.stopped:
        world.shell.outcome = before.stopped
        world.shell.close()
        return
    seats = {name: name in state.warm for name in sorted(state.seats)}
    avoided = {name: seat.avoided for name, seat in state.seats.items()}
    committed_step = state.committed_step
    world.shell.post(ControllerRestarted(world.incarnation, before.now))
    _hear_late(world)
    _find_store(world, state)
    _find_keepers(world, state)
    _find_workers(world, seats, avoided, committed_step)
    for command in again:
        world.carry_out(command)


def _hear_late(world: World) -> None:
    """What was sent to the dead one may come before, amid or after what is sent to this one."""
    for link in world.links.values():
        link.down = Channel(world.timeline)
    unheard, world.unheard = world.unheard, []
    delay_s = world.random.uniform(0.0, 0.01)
    for arrive in unheard:
        world.timeline.after(delay_s, arrive)


def _find_store(world: World, state: CoreState) -> None:
    if world.around.store_port:
        world.shell.post(StoreReady("host", world.around.store_port))
    elif state.store_port:
        world.shell.post(StoreLost(GONE))
    else:
        world.carry_out(StartStore())


def _find_keepers(world: World, state: CoreState) -> None:
    for node in sorted(state.keepers.keys() | state.starting_keepers):
        if node in world.around.keepers:
            world.shell.post(KeeperReady(world.around.keepers[node].keeper))
        elif node in state.keepers:
            world.shell.post(KeeperLost(node, GONE))
        else:
            world.carry_out(StartKeeper(node))


def _find_workers(
    world: World, seats: dict[str, bool], avoided: dict[str, tuple[str, ...]], committed_step: int
) -> None:
    """`seats` tells of each whether it had been warm."""
    for stranger in world.nodes.waiting.keys() - seats.keys():
        del world.nodes.waiting[stranger]
    for stranger in [w for name, w in world.workers.items() if name not in seats]:
        world.kill(stranger, "nobody knows it")
    for name, was_warm in seats.items():
        worker = world.workers.get(name)
        if worker:
            meet = partial(worker.meet, world.incarnation, committed_step)
            world.links[name].down.send(world.latency_s(), meet)
            if worker.control.frozen:
                world.suspect_later(worker)
        elif was_warm:
            world.post_soon(WorkerLost(name, GONE))
        elif name not in world.nodes.waiting:
            world.start_worker(name, avoided[name])
