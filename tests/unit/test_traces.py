"""Availability traces: formats, generated traces, and what is refused."""

from __future__ import annotations

import pytest

from elastic.simulation.trace import ADD, NOTICE, REMOVE, InvalidTrace, parse_trace
from pipelines.errors import UserError
from pipelines.simulation.generator import generate

TABLE = (
    "time,node,event,price\n0,a,add,2\n0,b,add,4\n1800,b,notice,\n1920,b,remove,\n3600,b,add,3\n"
)
BAMBOO = "0,add,node1\n0,add,node2\n12000,remove,node1\n20000,add,node1\n"
PARCAE = """[0, "add", {"nodes": ["node-0", "node-1"], "duration": 60000}]
[60000, "no-op", {"nodes": [], "duration": 60000}]
[120000, "remove", {"nodes": ["node-1"], "duration": 60000}]
"""
SKYPILOT = '{"metadata": {"gap_seconds": 600}, "data": [3, 3, 1, 2]}'


def test_table_has_seconds_notices_and_prices() -> None:
    trace = parse_trace(TABLE)
    assert trace.peak == 2
    assert trace.end_s == 3600
    assert trace.num_changes == 2
    [notice] = [change for change in trace.changes if change.kind == NOTICE]
    assert (notice.time_s, notice.until_s) == (1800, 1920)
    assert trace.cost(3600) == pytest.approx(2 + 4 * 1920 / 3600)
    assert trace.worker_s(4, 6, 3600) == pytest.approx(1920 * 6 + 1680 * 4)


def test_formats_of_bamboo_parcae_and_skypilot_are_recognised() -> None:
    bamboo, parcae, skypilot = map(parse_trace, (BAMBOO, PARCAE, SKYPILOT))
    assert list(bamboo.counts()) == [(0, 2), (12, 1), (20, 2)]
    assert list(parcae.counts()) == [(0, 2), (120, 1)]
    assert parcae.end_s == 180
    assert list(skypilot.counts()) == [(0, 3), (1200, 1), (1800, 2)]
    assert skypilot.end_s == 2400
    assert bamboo.cost(20) is None


def test_notice_precedes_each_removal() -> None:
    trace = parse_trace(BAMBOO).with_notice(5)
    kinds = [(change.time_s, change.kind) for change in trace.changes if change.node == "node1"]
    assert kinds == [(0, ADD), (7, NOTICE), (12, REMOVE), (20, ADD)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("0,add\n", "line 1 has 2 fields"),
        ("0,lose,a\n", "line 1: event 'lose'"),
        ("soon,add,a\n", "line 1: time 'soon'"),
        ("0,add,a\n5,add,a\n", "at 0.005 s: node a is added, but it is there"),
        ("0,remove,a\n", "at 0 s: node a has a remove, but it is not there"),
        ("0,add,a\n", "all changes are at time 0"),
        ("time,event\n0,add\n", "line 1 lacks the column node"),
        ("time,node,event\n0,a,add\n9,a,leave\n", "line 3: event 'leave'"),
        ("[0, 1]\n", "line 1 is not"),
        ('{"data": [1]}', "gap_seconds"),
    ],
)
def test_bad_trace_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InvalidTrace, match=r"\A[^\n]+\Z") as refused:
        parse_trace(text)
    assert message in str(refused.value)


def test_generated_trace_depends_on_its_settings_and_seed() -> None:
    text = "nodes=16,hours=48,mtbf_h=24,rack=4,correlated=0.5,notice_s=30,price=2,price_spread=0.1"
    trace = generate(text)
    assert trace == generate(text)
    assert trace != generate(f"{text},seed=1")
    assert trace.peak == 16
    at_once = [c.time_s for c in trace.changes if c.kind == REMOVE]
    assert len(at_once) > len(set(at_once)), "a rack is lost at once"
    assert 1.8 < (trace.cost(trace.end_s) or 0) / (trace.worker_s(1, 16, trace.end_s) / 3600) < 2.2
    losses = generate("nodes=100,hours=240,mtbf_h=24,replace_s=0").num_removed
    assert losses == pytest.approx(1000, rel=0.15)


def test_generated_capacity_stays_within_its_limits() -> None:
    counts = [
        n for _, n in generate("nodes=20,mtbf_h=1e6,capacity_least=5,capacity_every_h=1").counts()
    ]
    assert min(counts) >= 5
    assert max(counts) == 20
    assert len(counts) > 15


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes", "write key=value"),
        ("node=3", "there is no node; similar: nodes"),
        ("nodes=-1", "nodes: input should be greater than 0"),
        ("correlated=2", "correlated: input should be less than or equal to 1"),
        ("nodes=2,capacity_least=3", "capacity_least=3 is above nodes=2"),
    ],
)
def test_bad_generator_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=r"^--generate") as refused:
        generate(text)
    assert message in str(refused.value)
