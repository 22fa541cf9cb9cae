"""What must hold of a run after whatever befell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from harness import Outcome, read


def assert_nothing_redone(run: Outcome) -> None:
    """Invariant 8, and the promise of replicas: each step stands once in the metrics."""
    assert [line["step"] for line in run.metrics] == list(range(1, run.stopped.step + 1))
    assert not run.told("RolledBack")


def assert_each_sample_once(
    run: Outcome, batch: int, skipped_batches: Collection[int] = ()
) -> None:
    """Invariant 5, from what the data ranks read: of a step its last generation counts. Batches
    with the numbers `skipped_batches` are those that nobody read."""
    lines = read(run.folder / "samples.jsonl")
    committed = {line["step"]: line["generation"] for line in run.metrics}
    used = Counter(
        one
        for line in lines
        if line["step"] in committed and line["generation"] == committed[line["step"]]
        for one in line["ids"]
    )
    numbers = [
        n for n in range(run.stopped.step + len(skipped_batches)) if n not in skipped_batches
    ]
    assert used == Counter(n * batch + i for n in numbers[: run.stopped.step] for i in range(batch))


def survivors_keep_their_processes(run: Outcome, survivors: set[str]) -> None:
    """No survivor is lost, and the last assignment has each of them.

    A layout of two stages has no place for the third survivor: it is a standby worker until the
    replacement of the fourth has started, which a short run need not see.
    """
    assert {line["worker"] for line in run.told("WorkerLost")}.isdisjoint(survivors)
    last = run.told("Form")[-1]["assignment"]
    assert survivors <= {*last["members"], *last["standbys"]}
