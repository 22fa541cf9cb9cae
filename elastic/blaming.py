"""Blaming the batch: a fault that follows the samples ends whoever runs them, on any machine.

Whenever members are lost amid a step, what they ran of it is noted. What all losses of one step
have in common, if it is not the whole batch, is what to look at.
"""

from __future__ import annotations

from elastic.phases import Aborting, Pausing, Running
from elastic.samples import batch_ids, deal
from elastic.state import CoreState

NUM_TIMES = 4
"""After so many generations that the same microbatch has ended the run stops: that chance did it is
less likely than one in the third power of the number of data ranks."""


def note_loss(state: CoreState, worker: str) -> None:
    """A member is gone: was it by what it ran?"""
    held, step = state.held, state.committed_step + 1
    if held is None or not isinstance(state.phase, Running | Pausing | Aborting):
        return
    if step != state.fatal_step:
        state.fatal_step, state.fatal = step, []
    layout = held.assignment.layout
    data_rank = layout.data_rank(held.assignment.world_rank(worker))
    ran = deal(state.job.num_microbatches, layout.num_data_ranks)[data_rank]
    state.fatal = [*state.fatal, (state.generation, ran)]


def verdict(state: CoreState) -> str:
    """What to say of the samples, if they are to blame; empty if they are not."""
    suspects = _suspects(state)
    if len(suspects) < NUM_TIMES:
        return ""
    common = sorted(set.intersection(*suspects))
    if not common or len(common) == state.job.num_microbatches:
        return ""
    return (
        f"step {state.fatal_step} has ended whoever ran microbatch {_spans(common)} of it, "
        f"{len(suspects)} times{_ids(state, common)}: look at these samples"
    )


def _suspects(state: CoreState) -> list[set[int]]:
    """The microbatches of those lost in each generation that was in that step."""
    if state.fatal_step != state.committed_step + 1:
        return []
    by_generation: dict[int, set[int]] = {}
    for generation, ran in state.fatal:
        by_generation.setdefault(generation, set()).update(ran)
    return list(by_generation.values())


def _ids(state: CoreState, microbatches: list[int]) -> str:
    size = state.job.microbatch
    if not size:
        return ""
    ids = batch_ids(state.fatal_step, state.job.num_microbatches * size, state.left_out)
    return f" (sample id {_spans([i for m in microbatches for i in ids[m * size :][:size]])})"


def _spans(numbers: list[int]) -> str:
    """Ascending numbers, those in a row together."""
    firsts = [n for n in numbers if n - 1 not in numbers]
    lasts = [n for n in numbers if n + 1 not in numbers]
    ends = zip(firsts, lasts, strict=True)
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in ends)
