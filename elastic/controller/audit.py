"""Audits: replicas are compared, and a majority shows which worker's state is corrupt."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.controller.aborting import abort, on_lost
from elastic.duties.membership import forget
from elastic.duties.quarantine import blame
from elastic.duties.rollback import order_rollback, rollback_obstacle, void_after
from elastic.protocol.commands import Command, StopWorker
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Audited
from elastic.protocol.notes import Warned
from elastic.protocol.phases import Aborting, Ending, Pausing, Running

SILENT = "silent corruption"

AuditSplit = tuple[tuple[str, ...], ...]
"""The holders of one part of the state, grouped by what they hold, the largest group first."""


def compare(
    workers: Sequence[str], parts: Sequence[int], sums: Sequence[int]
) -> tuple[int, tuple[AuditSplit, ...]]:
    """The smallest number of holders of any part, and the parts whose holders differ.

    For each worker, `parts` has a number for the part of the state that it holds, and `sums` the
    checksum of that part.
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


def on_audited(state: ControllerState, now: float, event: Audited) -> list[Command]:
    """Replace the workers that differ from a majority; without a majority, roll back to the last
    clean audit."""
    is_at_work = isinstance(state.phase, Running | Pausing | Aborting)
    if event.generation != state.generation or not is_at_work:
        return []
    if not event.splits:
        if event.num_replicas > 1:
            state.audits.audited_step = min(event.step, state.committed_step)
        return []
    if state.audits.differing_generation == event.generation:
        return []  # another worker has reported it, and this generation ends
    state.audits.differing_generation = event.generation
    decided = [split for split in event.splits if _has_majority(split)]
    undecided = [split for split in event.splits if not _has_majority(split)]
    culprits = {w: len(split[0]) for split in decided for group in split[1:] for w in group}
    obstacle = rollback_obstacle(state, state.audits.audited_step)
    # Later checkpoints may contain the corrupt replica; no audit would detect it after a restore.
    void_after(state, state.audits.audited_step)
    commands: list[Command] = []
    for worker, majority_size in sorted(culprits.items()):
        text = f"{worker} holds different bits than {majority_size} replicas of the same state"
        commands.append(_warned(event, f"{text} at step {event.step}: it is replaced"))
        commands.append(StopWorker(worker, SILENT))
        commands += blame(state, now, worker, SILENT)
        forget(state, now, worker, SILENT)
    if undecided:
        cause = _undecided_text(event, undecided)
        commands.append(_warned(event, cause))
        _roll_back(state, cause, obstacle)
    elif state.policy.audit_rollback:
        cause = f"{_listed(sorted(culprits))} corrupted the gradients up to step {event.step}"
        _roll_back(state, cause, obstacle)
    return commands + _continue_without(state, now, sorted(culprits))


def _continue_without(state: ControllerState, now: float, culprits: Sequence[str]) -> list[Command]:
    if not culprits:
        return []
    if not isinstance(state.phase, Aborting):
        return abort(state, now, f"{_listed(culprits)}: {SILENT}", len(culprits))
    commands: list[Command] = []
    for worker in culprits:
        commands += on_lost(state, now, worker) if isinstance(state.phase, Aborting) else []
    return commands


def _undecided_text(event: Audited, splits: Sequence[AuditSplit]) -> str:
    suspects = sorted({worker for split in splits for group in split for worker in group})
    text = f"{_listed(suspects)} hold different bits of the same state at step {event.step}"
    return f"{text}, and no majority shows which are right"


def _roll_back(state: ControllerState, cause: str, obstacle: str) -> None:
    """Roll back to the last clean audit or before. If that is impossible, or happens too often, the
    run ends so that a person can decide."""
    limit = state.audits.audited_step
    if not obstacle and order_rollback(state, limit, cause, is_state_in_doubt=True):
        return
    obstacle = obstacle or f"{state.policy.max_rollbacks} rollbacks have not helped"
    state.ending = state.ending or Ending("failed", f"{cause}; {obstacle}")


def _has_majority(split: AuditSplit) -> bool:
    return 2 * len(split[0]) > sum(map(len, split))


def _by_size(group: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    return -len(group), group


def _listed(workers: Sequence[str]) -> str:
    return " and ".join(workers)


def _warned(event: Audited, text: str) -> Warned:
    return Warned(event.generation, event.step, "audit", text)
