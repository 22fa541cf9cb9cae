"""The controllers of a run: the death of one alone, and the next one, as on Ray."""

from __future__ import annotations

from functools import partial
from random import Random

from sim.fleet import SimFleet, SimPublisher
from sim.shell import CheckFailed, ControllerDied, ControllerProcess, Death
from sim.storage import find_checkpoints
from sim.world import World

from actors.storage.errors import LeaseLost
from elastic.protocol.commands import Stopped

LOOK_EVERY_S = 2.0
"""As in a real run; less often if a step takes longer, so that the simulation does not."""


def run_controllers(world: World) -> Stopped:
    """Run one controller after the other, to the run's end. Raises `CheckFailed`."""
    while True:
        is_job, world.successor = world.successor == "job", ""
        world.incarnation += 1
        if is_job:
            world.since = world.incarnation
            world.begin_job()
        process = _start_controller(world)
        fleet, publisher = SimFleet(world, process), SimPublisher(world, process)
        try:
            return process.run(fleet, publisher, world.opening, None if is_job else fleet)
        except ControllerDied:
            _await_successor(world)
        except LeaseLost:
            world.end_workers()  # its fleet is closed
            world.successor = "job"


def _start_controller(world: World) -> ControllerProcess:
    world.around.incarnation = world.incarnation
    world.shell = ControllerProcess(
        world.timeline,
        world.records,
        world.checks.after,
        partial(find_checkpoints, world.storage),
        world.scenario.horizon_s,
        max(LOOK_EVERY_S, world.scenario.step_s[1]),
        world.incarnation,
        world.since,
    )
    state = world.shell.core.state
    world.checks.note_restart(state.committed_step, state.generation)
    return world.shell


def _await_successor(world: World) -> None:
    world.timeline.run(world.scenario.horizon_s, lambda: bool(world.successor))
    if not world.successor:
        raise CheckFailed("invariant 9: the run does not end: no controller")


def kill_controller(world: World) -> None:
    """The controller dies during its next event or at once, and is back a little later."""
    absence_s = world.random.uniform(*world.scenario.absence_s)
    dead = world.shell

    def come_back() -> None:
        if world.shell is dead:
            world.successor = world.successor or "controller"

    def die() -> None:
        world.checks.note_fault(world.timeline.now + absence_s)
        for link in world.links.values():
            link.loses_older = world.random.random() < 0.5
        world.timeline.after(absence_s, come_back)

    if world.random.random() < 0.5:
        num_lines, num_commands = world.random.randint(0, 5), world.random.randint(0, 4)
        at_durable = Random(f"{world.scenario.seed}/{num_lines}/{absence_s}").random() < 0.3
        dead.die_at_next_event(Death(num_lines, num_commands, die, at_durable))
    elif dead.outcome is None:
        dead.die()
        die()
