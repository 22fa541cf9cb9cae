"""Invariant 10: a replay of the journal, from its start or from any full state, is exact."""

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
    drawn_with_layout_requests,
    drawn_with_parities,
)
from sim.shell import replay, replay_newest
from sim.simulation import simulate

from elastic.controller.core import Core
from elastic.protocol.commands import RecordStep
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.wire import command_line, encode, is_steps, replayed, steps_of
from elastic.replay.replay import Replay

SEEDS = (*range(700, 720), 754, 774, 795, 821)
UNWRITTEN_COMMAND = "RecordStep"


def commands_after(core: Core, lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The commands of a core that receives the events of a journal, as journal lines.

    A full state replaces reports that led to no command.
    """
    for line in lines:
        if is_steps(line):
            for now, event in steps_of(line):
                assert all(isinstance(c, RecordStep) for c in core.step(now, event))
            continue
        entry = replayed(line)
        if entry is None:
            continue
        if isinstance(entry, ControllerState):
            core.state = entry
            continue
        commands = core.step(line["time"], entry)
        for command in commands:
            command_row = json.loads(json.dumps(command_line(line["time"], command, core.state)))
            if command_row["command"] != UNWRITTEN_COMMAND:
                yield command_row


def result_of(replay: Replay) -> tuple[Any, ...]:
    """Everything that a controller takes from a replay of a journal."""
    state = encode(replay.core.state)
    return (
        state,
        replay.now,
        replay.num_events,
        replay.stopped,
        replay.missing_commands(),
        replay.commands_to_repeat(),
    )


def journalled_commands(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "command" in line]


@pytest.mark.parametrize(
    "draw",
    [
        drawn,
        drawn_with_layout_requests,
        drawn_with_bad_numbers,
        drawn_with_parities,
        drawn_with_controller_restarts,
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_replay_yields_the_same_commands_and_the_same_state(
    seed: int, draw: Callable[[int], Scenario]
) -> None:
    world = simulate(draw(seed), keep_journal=True)
    texts = world.records.journal
    assert texts
    lines = [json.loads(text) for text in texts]
    final = encode(world.shell.core.state)
    assert encode(replay(texts).core.state) == final
    assert result_of(replay_newest(texts)) == result_of(replay(texts))
    begins = [0, *(i for i, line in enumerate(lines) if "ControllerState" in line)]
    for begin in begins:
        core = Core(replayed(lines[begin])) if begin else Core()
        later = lines[begin + 1 :] if begin else lines
        assert list(commands_after(core, later)) == journalled_commands(later)
        assert encode(core.state) == final


def test_journal_cut_anywhere_replays_to_the_state_of_that_moment() -> None:
    """A replay from the newest full state equals one from the first line, wherever the journal
    ends."""
    world = simulate(drawn_with_parities(701), keep_journal=True)
    texts = world.records.journal or []
    whole = Replay()
    for i, text in enumerate(texts):
        whole.take(json.loads(text))
        if i % 5 == 0 or '"ControllerState"' in text:
            assert result_of(replay_newest(texts[: i + 1])) == result_of(whole)
