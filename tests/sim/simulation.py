"""Simulation of a scenario to its end; a failure comes with a readable trace."""

from __future__ import annotations

from sim.controller_restarts import run_controllers
from sim.fault_injection import inflict
from sim.reporting import command_in_words, event_in_words
from sim.scenario import Scenario
from sim.shell import CheckFailed
from sim.world import World

NUM_TRACED_EVENTS = 60


def simulate(scenario: Scenario, keep_journal: bool = False) -> World:
    """Simulate a run to its end. Raises AssertionError with the seed and a readable trace."""
    world = World(scenario, inflict, keep_journal)
    try:
        world.check_end(run_controllers(world))
    except (Exception, CheckFailed) as error:
        raise AssertionError(f"{error}\n{trace(world)}") from error
    return world


def trace(world: World) -> str:
    """The scenario, the faults, and the last events with their commands."""
    faults = [f"{at:9.3f} FAULT {action}: {where}" for at, action, where in world.struck]
    lines = []
    for now, event, commands, phase in world.records.trace[-NUM_TRACED_EVENTS:]:
        lines.append(f"{now:9.3f} {phase:8} {event_in_words(event)}")
        lines += [f"{'':20}-> {command_in_words(command)}" for command in commands]
    return "\n".join([str(world.scenario), *faults, *lines])
