"""The checks of simulated runs notice violations."""

from __future__ import annotations

from random import Random

import pytest
from sim.checks import Checks, newest_covered
from sim.lineage import Lineage, Part, regions_under
from sim.storage import Storage, Written

from elastic.controller.core import Core
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.protocol.commands import PublishCheckpoint, RecordStep, Resume
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.duty_records import WorkerRecord
from elastic.protocol.duty_state import MembershipDuty
from elastic.protocol.events import StateReady, Woke
from elastic.protocol.notes import RolledBack
from elastic.protocol.votes import StepRecord

TWO_SHARDS = Assignment(1, Layout(fsdp=2), ("w0", "w1"))


def part_of(worker: str, *generations: int) -> Part:
    """A worker's part after these steps."""
    lineage = Lineage()
    for generation in generations:
        lineage = lineage.then(generation)
    regions = regions_under(TWO_SHARDS, worker)
    pieces = {i: lineage.values(i, region) for i, region in regions.items()}
    return Part(TWO_SHARDS, lineage, regions, pieces)


def apply(part: Part, step: int, generation: int) -> None:
    for _ in part.apply(step, generation):
        pass


def file_of(part: Part) -> Written:
    return Written(part.lineage, {i: (part.regions[i], part.pieces[i]) for i in part.regions})


def record(step: int) -> RecordStep:
    return RecordStep(StepRecord(0.0, step, 1, 2, 1.0, 1, 0.1, 1.0, 0.5, skipped=False))


def test_a_step_changes_every_element() -> None:
    part = part_of("w0", 1, 1)
    apply(part, 3, generation=2)
    assert part.is_whole()
    assert part.pieces == part_of("w0", 1, 1, 2).pieces
    assert part.pieces != part_of("w0", 1, 1, 1).pieces


@pytest.mark.parametrize("steps", [(1, 1), (2,), (2, 1)])
def test_a_doubled_skipped_or_reordered_step_is_detected(steps: tuple[int, ...]) -> None:
    part = part_of("w0")
    for step in steps:
        apply(part, step, generation=1)
    assert not part.is_whole()


def test_an_apply_that_broke_half_way_is_detected() -> None:
    part = part_of("w0")
    next(part.apply(1, 1))
    assert not part.is_whole()


def test_newest_covered_step_needs_all_shards_of_one_lineage() -> None:
    both = [part_of("w0", 1, 1), part_of("w1", 1, 1)]
    assert newest_covered(both) == 2
    assert newest_covered(both[:1]) == -1
    assert newest_covered([part_of("w0", 1, 1), part_of("w1", 1, 2)]) == -1


def test_an_incomplete_checkpoint_is_detected() -> None:
    storage = Storage()
    half = file_of(part_of("w0", 1))
    storage.write(1, 1, "part-w0", half)
    with pytest.raises(AssertionError, match="invariant 11"):
        storage.publish(PublishCheckpoint(1, 1, (half.named("part-w0"),)))


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (record(2), "invariant 8"),
        (Resume(1, 0, "dp=2", ("w0", "w1"), (), 0), "invariant 7"),
        (RolledBack(2, 0, 2, "initial"), "which is held"),
    ],
)
def test_a_wrong_command_is_detected(
    command: RecordStep | Resume | RolledBack, complaint: str
) -> None:
    held = [(name, part_of(name, 1, 1)) for name in TWO_SHARDS.members]
    core = Core(
        ControllerState(
            membership=MembershipDuty(
                records={name: WorkerRecord(0.0) for name in TWO_SHARDS.members}
            )
        )
    )
    core.state.membership.warm.update(TWO_SHARDS.members)
    checks = Checks(Random(0), 10.0, lambda names: held, lambda node: [])
    for name in TWO_SHARDS.members:
        checks.after(0.0, StateReady(name, 1, 0, 0, 0.0, 1, 1, 2), [], core)
    with pytest.raises(AssertionError, match=complaint):
        checks.after(0.0, Woke(), [command], core)
