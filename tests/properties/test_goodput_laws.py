"""Goodput accounting for any journal lines in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipelines.observe.history.goodput import Account

WORKERS = st.sampled_from(["w0", "w1", "w2"])
GENERATIONS = st.integers(0, 3)


def line_of(
    kind: str, name: str, **values: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    fields = {"time": st.floats(-2.0, 20.0), "generation": GENERATIONS, **values}
    return st.fixed_dictionaries({kind: st.just(name), **fields})


RECORDS = st.fixed_dictionaries(
    {"step": st.integers(1, 12), "generation": GENERATIONS, "step_s": st.floats(0.0, 30.0)}
)
STEPS = st.integers(0, 12)
LINES = st.one_of(
    line_of("event", "RunOpened"),
    line_of("event", "WorkerReady", worker=WORKERS, node=st.just("node-0")),
    line_of("event", "WorkerLost", worker=WORKERS),
    line_of("event", "StepCommitted", record=RECORDS),
    line_of("event", "RolledForward", record=RECORDS),
    line_of("event", "Quiesced", records=st.lists(RECORDS, max_size=3)),
    line_of("event", "Paused"),
    line_of("event", "Woke"),
    line_of("command", "Waited"),
    line_of("command", "Pause"),
    line_of("command", "Abort"),
    line_of("command", "Form"),
    line_of("command", "Resume", step=STEPS),
    line_of("command", "RolledBack", step=STEPS),
    line_of("command", "Stopped"),
)
"""Journal lines; `time` is the delay since the previous line: a clock may also go back."""


def with_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    now, timed = 1_700_000_000.0, []
    for row in lines:
        now += row["time"]
        timed.append({**row, "time": now})
    return timed


@given(st.lists(LINES, min_size=1, max_size=60), st.floats(0.0, 50.0))
def test_parts_of_the_time_split_add_up_to_the_wall_time(
    lines: list[dict[str, Any]], later_s: float
) -> None:
    account, first, newest, has_stopped = Account(), None, 0.0, False
    for row in with_times(lines):
        account.take(row)
        name = row.get("event") or row.get("command")
        if has_stopped and name != "RunOpened":
            continue
        first = row["time"] if first is None else first
        newest, has_stopped = max(newest, row["time"]), name == "Stopped"
        split = account.split()
        assert abs(split.wall_s - (newest - first)) < 1e-3
        parts = (split.compute_s, split.redone_s, split.paused_s, split.waiting_s, split.undriven_s)
        assert min(parts) > -1e-3
        assert split.undriven_s < split.waiting_s + 1e-3
        later_split = account.split(newest + later_s)
        assert abs(later_split.wall_s - split.wall_s - (0.0 if has_stopped else later_s)) < 1e-3
    assert all(0.0 <= (reading.split.goodput or 0.0) <= 1.001 for reading in account.readings)


@given(st.lists(LINES, min_size=1, max_size=40), st.integers(0, 40))
def test_account_of_a_prefix_does_not_depend_on_queries(
    lines: list[dict[str, Any]], cut: int
) -> None:
    """A restarted tracker reads the same numbers, so a metric that it sends twice is the same."""
    queried, once = Account(), Account()
    for index, row in enumerate(with_times(lines)):
        if index < cut:
            queried.split(row["time"] + 5.0)
        queried.take(row)
        once.take(row)
    assert queried.readings == once.readings
    assert queried.split() == once.split()
