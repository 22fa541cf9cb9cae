"""The line about a hang names the worker that made the others wait."""

from __future__ import annotations

from typing import Any

import pytest

from actors.distributed.collectives import progress_in
from elastic.protocol.events import GroupProgress
from pipelines.observe.history.hang import diagnose

WORKERS = ("w0", "w1", "w2", "w3")


def group(
    axis: str, begun: int, ended: int, operation: str = "all_reduce", ranks: Any = (0, 1, 2, 3)
) -> dict[str, Any]:
    return {
        "axis": axis,
        "ranks": list(ranks),
        "begun": begun,
        "ended": ended,
        "operation": operation,
    }


def report(*groups: dict[str, Any], position: str = "forward (net.py:33)") -> dict[str, Any]:
    return {"groups": groups, "position": position}


WAITS = report(group("world", 20, 20), group("replica", 58, 57))


def test_worker_that_computes_is_named_with_its_position() -> None:
    reports = dict.fromkeys(WORKERS, WAITS) | {
        "w2": report(group("world", 20, 20), group("replica", 57, 57))
    }
    assert diagnose(WORKERS, reports) == (
        "w2 (world rank 2) had not begun all_reduce number 58 of replica, in which w0, w1, w3 "
        "waited; w2 computed in forward (net.py:33)"
    )


def test_worker_that_skipped_a_collective_is_named_though_it_waits_in_another() -> None:
    reports = dict.fromkeys(WORKERS, WAITS) | {
        "w1": report(group("world", 21, 20), group("replica", 57, 57), position="")
    }
    assert diagnose(WORKERS, reports) == (
        "w1 (world rank 1) had not begun all_reduce number 58 of replica, in which w0, w2, w3 "
        "waited; w1 waited in all_reduce number 21 of world"
    )


def test_worker_behind_in_an_inner_axis_is_named_before_those_that_wait_for_it() -> None:
    """w3 computes; w2 waits for it along tp, and so w0 and w1 wait for w2 and w3 along replica."""
    reports = {
        "w0": report(group("replica", 9, 8, ranks=(0, 2)), group("tp", 40, 40, ranks=(0, 1))),
        "w1": report(group("replica", 9, 8, ranks=(1, 3)), group("tp", 40, 40, ranks=(0, 1))),
        "w2": report(group("replica", 8, 8, ranks=(0, 2)), group("tp", 40, 39, ranks=(2, 3))),
        "w3": report(group("replica", 8, 8, ranks=(1, 3)), group("tp", 39, 39, ranks=(2, 3))),
    }
    line = diagnose(WORKERS, reports)
    assert line.startswith("w3 (world rank 3) had not begun ")
    assert "w3 computed in forward" in line


def test_different_operations_as_the_same_collective_are_named() -> None:
    reports = dict.fromkeys(WORKERS, report(group("fsdp", 7, 6, "all_gather"))) | {
        "w3": report(group("fsdp", 7, 6, "reduce_scatter"))
    }
    assert diagnose(WORKERS, reports) == (
        "collective 7 of fsdp differs: w0, w1, w2 run all_gather, w3 run reduce_scatter"
    )


def test_worker_that_did_not_answer_is_named() -> None:
    reports = dict.fromkeys(WORKERS[:3], WAITS)
    assert diagnose(WORKERS, reports) == (
        "w3 did not answer, while w0, w1, w2 waited in all_reduce number 58 of replica"
    )


def test_many_names_are_shortened() -> None:
    workers = [f"w{number}" for number in range(1000)]
    reports = {worker: report(group("world", 5, 4, ranks=range(1000))) for worker in workers}
    reports |= {worker: report(group("world", 4, 4, ranks=range(1000))) for worker in workers[7:]}
    line = diagnose(workers, reports)
    assert len(line) < 300 and "w7, w8, w9, w10 and 989 more (world rank 7, 8, 9, 10) " in line


def test_equal_progress_blames_the_network() -> None:
    assert "the network" in diagnose(WORKERS, dict.fromkeys(WORKERS, WAITS))


def entry(group_id: int, name: str, description: str, number: int, **changes: Any) -> Any:
    return {
        "time_created_ns": group_id,
        "pg_id": group_id,
        "process_group": [name, description],
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "retired": True,
        "is_p2p": False,
    } | changes


def test_progress_is_that_of_the_newest_generation() -> None:
    recorded = {
        "entries": [
            entry(0, "0", "default_pg", 9),
            entry(1, "1", "mesh_tp", 30),
            entry(4, "0", "default_pg", 1),
            entry(5, "1", "mesh_replica", 3, retired=False),
            entry(5, "1", "mesh_replica", 90, is_p2p=True),
        ],
        "pg_status": {"5": {"last_completed_collective": "2"}},
        "pg_config": {"0": {"ranks": "[0, 1]"}, "1": {"ranks": "[0, 1]"}},
    }
    assert progress_in(recorded, since_ns=4) == (
        GroupProgress("world", (0, 1), 1, 1, "all_reduce"),
        GroupProgress("replica", (0, 1), 3, 2, "all_reduce"),
    )


@pytest.mark.parametrize("recorded", [{}, {"entries": []}])
def test_empty_recorder_has_no_progress(recorded: dict[str, Any]) -> None:
    assert progress_in(recorded, since_ns=0) == ()


def test_generation_that_hangs_before_its_first_collective_of_the_world_has_no_older_groups() -> (
    None
):
    recorded = {
        "entries": [entry(0, "0", "default_pg", 9), entry(5, "1", "mesh_replica", 1)],
        "pg_config": {"1": {"ranks": "[0, 1]"}},
    }
    [progress] = progress_in(recorded, since_ns=4)
    assert progress.axis == "replica"


def test_operations_that_differ_are_named_though_torch_notes_their_end_at_once() -> None:
    """Gloo's entries are retired when they are begun."""
    reports = {"w0": report(group("fsdp", 7, 7, "all_gather")), "w1": report(group("fsdp", 7, 7))}
    assert "w0 run all_gather, w1 run all_reduce" in diagnose(("w0", "w1"), reports)
