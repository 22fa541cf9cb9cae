"""Invariant 10: replaying the journal, from its start or from any full state, changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sim.scenario import (
    Scenario,
    drawn,
    drawn_with_bad_numbers,
    drawn_with_controller_restarts,
    drawn_with_parities,
    drawn_with_relayouts,
)
from sim.shell import replay
from sim.simulation import simulate

from elastic.core import Core
from elastic.state import CoreState
from elastic.wire import command_line, encode, replayed

SEEDS = (*range(700, 720), 754, 774, 795, 821)
SILENT = "RecordStep"


def commands_after(core: Core, lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What a core says when it is told a journal's events, as journal lines."""
    for line in lines:
        told = replayed(line)
        if told is None or isinstance(told, CoreState):
            continue
        commands = core.step(line["time"], told)
        for command in commands:
            said = json.loads(json.dumps(command_line(line["time"], command, core.state)))
            if said["command"] != SILENT:
                yield said


def journalled_commands(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "command" in line]


@pytest.mark.parametrize(
    "draw",
    [
        drawn,
        drawn_with_relayouts,
        drawn_with_bad_numbers,
        drawn_with_parities,
        drawn_with_controller_restarts,
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_replay_says_the_same_and_stands_where_the_run_stood(
    seed: int, draw: Callable[[int], Scenario]
) -> None:
    world = simulate(draw(seed), keep_journal=True)
    texts = world.records.journal
    assert texts
    lines = [json.loads(text) for text in texts]
    final = encode(world.shell.core.state)
    assert encode(replay(texts).core.state) == final
    begins = [0, *(i for i, line in enumerate(lines) if "CoreState" in line)]
    for begin in begins:
        core = Core(replayed(lines[begin])) if begin else Core()
        rest = lines[begin:]
        # What the event before a full state has led to is part of it already.
        later = rest[next((i for i, line in enumerate(rest) if "event" in line), len(rest)) :]
        assert list(commands_after(core, later)) == journalled_commands(later)
        assert encode(core.state) == final


def test_a_journal_cut_anywhere_gives_the_state_of_that_moment() -> None:
    """A controller that died after any line begins where that line ends."""
    world = simulate(drawn(701), keep_journal=True)
    texts = world.records.journal or []
    core, now = Core(), 0.0
    for i, text in enumerate(texts):
        line = json.loads(text)
        told = replayed(line)
        now = max(now, line["time"])
        if told is not None and not isinstance(told, CoreState):
            core.step(now, told)
        if i % 25 == 0:
            assert encode(replay(texts[: i + 1]).core.state) == encode(core.state)
