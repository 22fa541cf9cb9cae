"""Which worker made the others wait when a run hung, by what each reports of its collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_NAMES = 4
GroupKey = tuple[str, tuple[int, ...]]
Progress = Mapping[GroupKey, Mapping[str, Any]]
"""A worker's progress in each of its groups, by axis and world ranks."""


def diagnose(workers: Sequence[str], reports: Mapping[str, Mapping[str, Any]]) -> str:
    """One line about a hang. `workers` are in world-rank order, `reports` the lines of
    `HangObserved` by worker."""
    progress = {worker: _progress(report) for worker, report in reports.items()}
    silent = [worker for worker in workers if worker not in progress]
    if silent:
        waits = next((text for w in progress if (text := _wait(w, progress))), "a collective")
        return f"{_named(silent)} did not answer, while {_named(list(progress))} waited in {waits}"
    return (
        _mismatch(workers, progress)
        or _lag(workers, progress, reports)
        or "all workers wait in the same collectives: the network between them may have failed"
    )


def _progress(report: Mapping[str, Any]) -> Progress:
    return {(group["axis"], tuple(group["ranks"])): group for group in report["groups"]}


def _mismatch(workers: Sequence[str], progress: Mapping[str, Progress]) -> str:
    """Workers that run different operations as the same collective of a group."""
    for key in _groups(progress):
        by_operation: dict[tuple[int, str], list[str]] = {}
        for worker in workers:
            group = progress[worker].get(key)
            if group is not None:
                by_operation.setdefault((group["begun"], group["operation"]), []).append(worker)
        numbers = [number for number, _ in by_operation]
        number = next((number for number in numbers if numbers.count(number) > 1), None)
        if number is not None:
            texts = [
                f"{_named(names)} run {operation}"
                for (begun, operation), names in by_operation.items()
                if begun == number
            ]
            return f"collective {number} of {key[0]} differs: {', '.join(texts)}"
    return ""


def _lag(
    workers: Sequence[str],
    progress: Mapping[str, Progress],
    reports: Mapping[str, Mapping[str, Any]],
) -> str:
    """The workers that are behind in a group; first those that wait for no other themselves."""
    found: list[tuple[bool, int, str]] = []
    for key in _groups(progress):
        members = [worker for worker in workers if key in progress[worker]]
        furthest = max(progress[worker][key]["begun"] for worker in members)
        behind = [worker for worker in members if progress[worker][key]["begun"] < furthest]
        waiting = [worker for worker in members if progress[worker][key]["begun"] == furthest]
        if not behind:
            continue
        operation = progress[waiting[0]][key]["operation"]
        own_wait = _wait(behind[0], progress)
        where = f"waited in {own_wait}" if own_wait else "computed"
        position = reports[behind[0]].get("position", "")
        ranks = ", ".join(str(workers.index(name)) for name in behind[:MAX_NAMES])
        text = (
            f"{_named(behind)} (world rank {ranks}) had not begun {operation} number {furthest} of "
            f"{key[0]}, in which {_named(waiting)} waited; {behind[0]} {where}"
            + (f" in {position}" if position else "")
        )
        found.append((bool(own_wait), len(behind), text))
    return min(found, default=(False, 0, ""))[2]


def _wait(worker: str, progress: Mapping[str, Progress]) -> str:
    """The collective in which a worker waits: it has not ended, or another has not begun it. On
    Gloo, torch may note the end at once."""
    for key, group in progress[worker].items():
        least = min(groups[key]["begun"] for groups in progress.values() if key in groups)
        if group["ended"] < group["begun"] or least < group["begun"]:
            return f"{group['operation']} number {group['begun']} of {key[0]}"
    return ""


def _groups(progress: Mapping[str, Progress]) -> list[GroupKey]:
    return sorted({key for groups in progress.values() for key in groups})


def _named(workers: Sequence[str]) -> str:
    more = f" and {len(workers) - MAX_NAMES} more" if len(workers) > MAX_NAMES else ""
    return ", ".join(workers[:MAX_NAMES]) + more
