"""When a draining node ends the run's waiting: equal to the rule, node by node, at any number."""

from __future__ import annotations

import sys
import time
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from test_draining import START, drain_node, make_training_core, quiesce

from elastic.controller.core import Core
from elastic.controller.drain import drain_deadline
from elastic.duties.membership import participants
from elastic.duties.recovery import find_live_state
from elastic.protocol.commands import Abort, StopWorker
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import NodeDraining, Paused, WorkerLost
from elastic.protocol.phases import Aborting, Breakable, Forming, Pausing, Resharding

LAYOUTS = {"dp=6": 6, "fsdp=6": 6, "dp=2,fsdp=3": 6, "dp=3,fsdp=2": 6, "dp=2,tp=2,fsdp=2": 8}


def on(state: ControllerState, node: str) -> set[str]:
    return {worker for worker, record in state.membership.records.items() if record.node == node}


def latest_end(state: ControllerState, node: str) -> float:
    """The rule for one node, read literally."""
    drains, phase = state.membership.node_drains, state.phase
    deadline = drains[node].deadline
    is_at_work = isinstance(phase, Breakable) and participants(state) & on(state, node)
    if not is_at_work or state.membership.num_staying() < state.policy.min_workers:
        return inf
    earlier = [other for other, drain in drains.items() if drain.deadline <= deadline]
    gone = set[str]().union(*(on(state, other) for other in earlier))
    if find_live_state(state, without=gone):
        return deadline
    if isinstance(phase, Forming | Resharding):
        return inf
    return deadline - state.forming.reshard_s


def assert_follows_the_rule(core: Core) -> None:
    state = core.state
    ends = {node: latest_end(state, node) for node in state.membership.node_drains}
    assert drain_deadline(state) == min(ends.values(), default=inf)


@st.composite
def cores(draw: st.DrawFn) -> Core:
    """A run that trains, or forms again after the loss of a worker."""
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    num_workers = LAYOUTS[layout]
    nodes = draw(st.text("abc", min_size=num_workers, max_size=num_workers) | st.just("abcdefgh"))
    core = make_training_core(nodes[:num_workers], layout)
    if draw(st.booleans()):
        core.step(START, WorkerLost("w0", "killed"))
        assert isinstance(core.state.phase, Aborting)
        quiesce(core, *(f"w{i}" for i in range(1, num_workers)))
    core.state.forming.reshard_s = draw(st.sampled_from([0.0, 1.0, 10.0]))
    return core


@settings(max_examples=200, deadline=None)
@given(
    core=cores(),
    order=st.permutations("abcdefx"),
    ends=st.lists(st.integers(1, 12), min_size=1, max_size=7),
)
def test_drain_deadline_equals_the_rule_node_by_node(
    core: Core, order: list[str], ends: list[int]
) -> None:
    for node, in_s in zip(order, ends, strict=False):
        # Not as an event, which would already act on it.
        core._take(START, NodeDraining(node, START + in_s, "a notice"))
        assert_follows_the_rule(core)


@pytest.mark.parametrize(
    ("in_s", "expected"), [((9, 5, 5), "b"), ((5, 9, 5), "a"), ((9, 9, 5), "c")]
)
def test_node_that_ends_first_is_aborted_first(in_s: tuple[int, ...], expected: str) -> None:
    core = make_training_core("abcd", "dp=4", min_workers=1)
    core.state.steps.measured.recent_s = [20.0]  # no boundary in time
    for node, seconds in zip("abc", in_s, strict=True):
        core._take(START, NodeDraining(node, START + seconds, "a notice"))
    commands = core._follow_up(START)
    [abort] = [command for command in commands if isinstance(command, Abort)]
    gone = {f"w{'abc'.index(node)}" for node, s in zip("abc", in_s, strict=True) if s == min(in_s)}
    assert {command.worker for command in commands if isinstance(command, StopWorker)} == gone
    assert f"node {expected} ends" in abort.cause


@pytest.mark.parametrize("num_nodes", [20, 60, 100])
def test_events_of_a_thousand_workers_stay_cheap_while_many_nodes_drain(num_nodes: int) -> None:
    core = make_large_core(num_nodes)
    began = time.process_time()
    for worker in core.state.live.members():
        core.step(START + 1.0, Paused(worker, 1, 1))
        core.next_deadline()
    took_s = time.process_time() - began
    print(f"1,000 events while {num_nodes} nodes drain: {took_s:.2f} s")
    assert took_s < 3.0


def make_large_core(num_nodes: int) -> Core:
    """A thousand workers on 200 nodes, some of which drain, each with an end of its own."""
    nodes = [chr(0x4E00 + node) for node in range(200)]
    places = "".join(nodes[i // 5] for i in range(1000))
    core = make_training_core(places, "dp=10,fsdp=100", batch=1000)
    for i, node in enumerate(nodes[:num_nodes]):
        drain_node(core, node, 60.0 + i)
    assert isinstance(core.state.phase, Pausing)
    return core
