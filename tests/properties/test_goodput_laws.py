"""Properties of goodput accounting for any journal in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipelines.observe.history.goodput import Account

WORKERS = st.sampled_from(["w0", "w1", "w2"])
GENERATIONS = st.integers(0, 3)


def line(
    kind: str, name: str, **values: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    fields = {"time": st.floats(-2.0, 20.0), "generation": GENERATIONS, **values}
    return st.fixed_dictionaries({kind: st.just(name), **fields})


RECORDS = st.fixed_dictionaries(
    {"step": st.integers(1, 12), "generation": GENERATIONS, "step_s": st.floats(0.0, 30.0)}
)
STEPS = st.integers(0, 12)
LINES = st.one_of(
    line("event", "RunOpened"),
    line("event", "WorkerReady", worker=WORKERS, node=st.just("node-0")),
    line("event", "WorkerLost", worker=WORKERS),
    line("event", "StepCommitted", record=RECORDS),
    line("event", "RolledForward", record=RECORDS),
    line("event", "Quiesced", records=st.lists(RECORDS, max_size=3)),
    line("event", "Paused"),
    line("event", "Woke"),
    line("command", "Waited"),
    line("command", "Pause"),
    line("command", "Abort"),
    line("command", "Form"),
    line("command", "Resume", step=STEPS),
    line("command", "RolledBack", step=STEPS),
    line("command", "Stopped"),
)
"""Journal lines; `time` is the delay since the previous line: a clock may also go back."""


def with_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    now, timed = 1_700_000_000.0, []
    for each in lines:
        now += each["time"]
        timed.append({**each, "time": now})
    return timed


@given(st.lists(LINES, min_size=1, max_size=60), st.floats(0.0, 50.0))
def test_the_parts_add_up_to_the_whole(lines: list[dict[str, Any]], later_s: float) -> None:
    account, first, newest, has_stopped = Account(), None, 0.0, False
    for each in with_times(lines):
        account.take(each)
        name = each.get("event") or each.get("command")
        if has_stopped and name != "RunOpened":
            continue
        first = each["time"] if first is None else first
        newest, has_stopped = max(newest, each["time"]), name == "Stopped"
        split = account.split()
        assert abs(split.wall_s - (newest - first)) < 1e-3
        parts = (split.compute_s, split.redone_s, split.paused_s, split.waiting_s, split.undriven_s)
        assert min(parts) > -1e-3
        assert split.undriven_s < split.waiting_s + 1e-3
        until = account.split(newest + later_s)
        assert abs(until.wall_s - split.wall_s - (0.0 if has_stopped else later_s)) < 1e-3
    assert all(0.0 <= (reading.split.goodput or 0.0) <= 1.001 for reading in account.readings)


@given(st.lists(LINES, min_size=1, max_size=40), st.integers(0, 40))
def test_the_account_of_a_prefix_does_not_depend_on_queries(
    lines: list[dict[str, Any]], cut: int
) -> None:
    """A restarted tracker reads the same: a metric that is delivered twice is the same."""
    queried, once = Account(), Account()
    for index, each in enumerate(with_times(lines)):
        if index < cut:
            queried.split(each["time"] + 5.0)
        queried.take(each)
        once.take(each)
    assert queried.readings == once.readings
    assert queried.split() == once.split()
