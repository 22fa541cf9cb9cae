"""Audits: replicas hold the same bits, or one of them is wrong, and a majority says which."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.controller.aborting import abort, on_lost
from elastic.duties.membership import forget
from elastic.duties.rollback import distrust, order_rollback, shortfall
from elastic.protocol.commands import Command, StopWorker, Warned
from elastic.protocol.controller_state import CoreState
from elastic.protocol.events import Audited
from elastic.protocol.phases import Aborting, Ending, Pausing, Running

SILENT = "silent corruption"

AuditSplit = tuple[tuple[str, ...], ...]
"""The holders of one part of the state, grouped by what they hold, the largest group first."""


def compare(
    workers: Sequence[str], parts: Sequence[int], sums: Sequence[int]
) -> tuple[int, tuple[AuditSplit, ...]]:
    """How many workers hold each part at least, and the parts of which they hold different bits.

    For each worker: which part of the state it holds, as a number, and the checksum of that.
    """
    holders: dict[int, dict[int, list[str]]] = {}
    for worker, part, checksum in zip(workers, parts, sums, strict=True):
        holders.setdefault(part, {}).setdefault(checksum, []).append(worker)
    fewest = min(sum(map(len, groups.values())) for groups in holders.values())
    splits = [
        tuple(sorted((tuple(sorted(group)) for group in groups.values()), key=_by_size))
        for groups in holders.values()
        if len(groups) > 1
    ]
    return fewest, tuple(sorted(splits))


def on_audited(state: CoreState, now: float, event: Audited) -> list[Command]:
    """Replace whom a majority names; where there is none, go back to the last clean audit."""
    is_at_work = isinstance(state.phase, Running | Pausing | Aborting)
    if event.generation != state.generation or not is_at_work:
        return []
    if not event.splits:
        if event.num_replicas > 1:
            state.audited_step = min(event.step, state.committed_step)
        return []
    if state.judged_generation == event.generation:
        return []  # another worker has told of it, and this generation ends
    state.judged_generation = event.generation
    named = [split for split in event.splits if _has_majority(split)]
    doubted = [split for split in event.splits if not _has_majority(split)]
    culprits = {w: len(split[0]) for split in named for group in split[1:] for w in group}
    why_not = shortfall(state, state.audited_step)
    # A part of these may be of a wrong copy, which nobody would see any more once it is read.
    distrust(state, state.audited_step)
    commands: list[Command] = []
    for worker, num_others in sorted(culprits.items()):
        told = f"{worker} holds other bits than {num_others} replicas of the same state"
        commands.append(_warned(event, f"{told} at step {event.step}: it is replaced"))
        commands.append(StopWorker(worker, SILENT))
        forget(state, now, worker, SILENT)
    if doubted:
        told = _doubted(event, doubted)
        commands.append(_warned(event, told))
        _go_back(state, told, why_not)
    elif state.policy.audit_rollback:
        told = f"{_listed(sorted(culprits))} had spoilt the gradients up to step {event.step}"
        _go_back(state, told, why_not)
    return commands + _go_on_without(state, now, sorted(culprits))


def _go_on_without(state: CoreState, now: float, culprits: Sequence[str]) -> list[Command]:
    if not culprits:
        return []
    if not isinstance(state.phase, Aborting):
        return abort(state, now, f"{_listed(culprits)}: {SILENT}", len(culprits))
    commands: list[Command] = []
    for worker in culprits:
        commands += on_lost(state, now, worker) if isinstance(state.phase, Aborting) else []
    return commands


def _doubted(event: Audited, splits: Sequence[AuditSplit]) -> str:
    suspects = sorted({worker for split in splits for group in split for worker in group})
    told = f"{_listed(suspects)} hold different bits of the same state at step {event.step}"
    return f"{told}, and nobody can tell whose are right"


def _go_back(state: CoreState, why: str, why_not: str) -> None:
    """To the last clean audit, or before. Where that cannot be, or it happens again and again, a
    person decides."""
    if not why_not and order_rollback(state, state.audited_step, why):
        return
    why_not = why_not or f"going back {state.policy.max_rollbacks} times has not helped"
    state.ending = state.ending or Ending("failed", f"{why}; {why_not}")


def _has_majority(split: AuditSplit) -> bool:
    return 2 * len(split[0]) > sum(map(len, split))


def _by_size(group: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    return -len(group), group


def _listed(workers: Sequence[str]) -> str:
    return " and ".join(workers)


def _warned(event: Audited, text: str) -> Warned:
    return Warned(event.generation, event.step, "audit", text)
