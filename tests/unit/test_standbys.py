"""Why workers stand by: in one line of the display and of a dry run, said once."""

from __future__ import annotations

from pathlib import Path

import pytest
from users_policy import users_policy
from written_runs import WrittenRun

from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Capacity, Job
from elastic.planner.layout_choice import LayoutChoice, plan_layout
from elastic.planner.standbys import describe_standbys
from elastic.protocol.commands import Resume
from elastic.protocol.events import RunOpened, WorkerDraining
from pipelines.observe.history.membership import Membership
from pipelines.observe.history.run_folder import Tail

ONE_MICROBATCH = (
    "3 workers stand by: a step has 1 microbatch: use more, smaller microbatches, so that each "
    "worker gets one"
)


@pytest.mark.parametrize(
    ("num_workers", "num_microbatches", "target", "text"),
    [
        (4, 1, "", ONE_MICROBATCH),
        (4, 4, "", ""),
        (
            4, 3, "", "1 worker stands by: a step has 3 microbatches: use more, smaller "
            "microbatches, so that each worker gets one",
        ),
        (
            6, 2, "tp=2", "2 workers stand by: a step has 2 microbatches: use more, smaller "
            "microbatches, so that each group of 2 workers gets one",
        ),
        (5, 8, "tp=2", "1 worker stands by: tp=2 needs 2 workers for each replica or shard"),
        (4, 8, "dp=2", ""),
    ],
)  # fmt: skip
def test_reason_names_what_limits_the_chosen_layout(
    num_workers: int, num_microbatches: int, target: str, text: str
) -> None:
    job = Job(num_microbatches=num_microbatches)
    target_layout = TargetLayout.parse(target)
    choice = plan_layout(None, Capacity(num_workers), target_layout, job, snapshots_cover=True)
    assert isinstance(choice, LayoutChoice)
    num_standbys = num_workers - choice.layout.num_workers
    assert describe_standbys(choice.layout, num_standbys, num_microbatches) == text


def test_event_below_the_generation_says_the_reason_once(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.append_event(
        RunOpened(1, users_policy(max_workers=4), TargetLayout(), Job(num_microbatches=1))
    )
    for number in range(4):
        run.ready(f"w{number}")
    run.resume("w0")
    run.commit()
    run.lose("w0")
    run.ready("w4")
    run.resume("w1")
    run.append_event(WorkerDraining("w4", "by request"))
    run.resume("w1")
    texts = [event.text for event in read(run).run_events if event.kind in ("resumed", "standby")]
    assert texts[0].startswith("generation 1: 1 worker (dp=1) from step 1")
    assert texts[1] == ONE_MICROBATCH
    assert texts[2].startswith("generation 2: 1 worker (dp=1)")
    assert texts[3].startswith("generation 3: 1 worker (dp=1)")
    assert texts[4].startswith("2 workers stand by: "), "a draining worker does not stand by"
    assert len(texts) == 5


def test_workers_above_the_limit_are_not_explained(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.append_event(
        RunOpened(1, users_policy(max_workers=2), TargetLayout(), Job(num_microbatches=2))
    )
    for number in range(3):
        run.ready(f"w{number}")
    run.append_command(Resume(1, 0, str(Layout(dp=2)), ("w0", "w1"), (), 0))
    assert [event.kind for event in read(run).run_events].count("standby") == 0


def read(run: WrittenRun) -> Membership:
    membership = Membership()
    for line in Tail(run.folder.journal).drain():
        membership.take(line)
    return membership
