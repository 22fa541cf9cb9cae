"""Assertions that hold for a run, whatever faults it had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from harness import Outcome, read_lines


def assert_no_step_repeated(run: Outcome) -> None:
    """Invariant 8, and the guarantee of replicas: each step is in the metrics once."""
    assert [line["step"] for line in run.metrics] == list(range(1, run.stopped.step + 1))
    assert not run.lines_of("RolledBack")


def assert_each_sample_once(
    run: Outcome, batch: int, skipped_batches: Collection[int] = ()
) -> None:
    """Invariant 5, from the samples that the data ranks read: the last generation of a step counts.

    No rank may have read the batches with the numbers `skipped_batches`.
    """
    lines = read_lines(run.folder / "samples.jsonl")
    committed = {line["step"]: line["generation"] for line in run.metrics}
    num_reads = Counter(
        sample
        for line in lines
        if line["step"] in committed and line["generation"] == committed[line["step"]]
        for sample in line["ids"]
    )
    batch_numbers = [
        n for n in range(run.stopped.step + len(skipped_batches)) if n not in skipped_batches
    ]
    assert num_reads == Counter(
        n * batch + i for n in batch_numbers[: run.stopped.step] for i in range(batch)
    )


def assert_survivors_kept(run: Outcome, survivors: set[str]) -> None:
    """No survivor is lost, and the last assignment has each of them.

    A layout of two stages has no place for the third survivor: it is a standby worker until the
    replacement of the fourth has started, which a short run need not see.
    """
    assert {line["worker"] for line in run.lines_of("WorkerLost")}.isdisjoint(survivors)
    last_assignment = run.lines_of("Form")[-1]["assignment"]
    assert survivors <= {*last_assignment["members"], *last_assignment["standbys"]}
