"""Poison-batch detection: samples that end every worker that runs them.

When a member is lost during a step, or during the evaluation after one, the microbatches that it
ran are noted. The microbatches that all losses of one step share are suspect, unless they are the
whole batch.
"""

from __future__ import annotations

from elastic.duties.recovery import find_live_state
from elastic.duties.uploads import break_uploads
from elastic.geometry.sample_order import batch_ids, deal, sample_of
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.phases import Aborting, Pausing, Running

NUM_TIMES = 4
"""The run stops after the same microbatch has ended so many generations: the chance that this is a
coincidence is less than one in the cube of the number of data ranks."""


def note_lost_worker(state: ControllerState, worker: str) -> None:
    """Note what a lost member ran: training data, or held-out data if an evaluation is due.

    A worker that was silent says nothing about its data: a slow sample is not a fatal one.
    """
    if state.membership.records[worker].silent_in == state.generation:
        return
    held, step = state.live.held, state.committed_step + 1
    if held is None or not isinstance(state.phase, Running | Pausing | Aborting):
        return
    is_evaluation = is_evaluating(state)
    if (step, is_evaluation) != (state.poison.fatal_step, state.poison.is_fatal_evaluation):
        state.poison.fatal_step, state.poison.is_fatal_evaluation, state.poison.fatal = (
            step,
            is_evaluation,
            [],
        )
    layout = held.assignment.layout
    data_rank = layout.data_rank(held.assignment.world_rank(worker))
    num_microbatches = _num_microbatches(state)
    shares = () if is_evaluation else held.assignment.shares
    dealt = deal(num_microbatches, layout.num_data_ranks, shares) if num_microbatches else ()
    ran = dealt[data_rank] if dealt else ()
    state.poison.fatal = [*state.poison.fatal, (state.generation, ran)]


def is_evaluating(state: ControllerState) -> bool:
    """Whether the members evaluate the committed step: its evaluation is due and not reported."""
    every, step = state.job.eval_every, state.committed_step
    return bool(every) and step > state.evaluated_step and step % every == 0


def find_poison_batch(state: ControllerState) -> str:
    """The reason to end the run if samples are to blame; empty otherwise."""
    suspects = _suspects(state)
    if len(suspects) < NUM_TIMES:
        return ""
    common = sorted(set.intersection(*suspects))
    if not common or len(common) == _num_microbatches(state):
        return ""
    fatal_work = f"step {state.poison.fatal_step}"
    if state.poison.is_fatal_evaluation:
        fatal_work = f"the evaluation after step {state.poison.fatal_step - 1}"
    return (
        f"{fatal_work} has ended every worker that ran its microbatch {_spans(common)}, "
        f"{len(suspects)} times: look at {_samples(state, common)}"
    )


def guarded_step(state: ControllerState) -> int:
    """The step that may begin only after the state before it is durably saved; 0 for none.

    A step that has ended a member may end the next one that runs it. So it does not begin unsaved
    in a worker that holds the whole state alone. Once the step has ended members of two
    generations, it does not begin unsaved if any worker holds a part that no other worker has.
    """
    held, step = state.live.held, state.poison.fatal_step
    if held is None or state.poison.is_fatal_evaluation or not state.poison.fatal or state.ending:
        return 0
    if step == state.poison.unguarded_step:
        return 0
    if (
        not state.committed_step < step <= state.job.steps
        or state.checkpoints.saved_step >= step - 1
    ):
        return 0
    members = held.assignment.members
    num_generations = len({generation for generation, _ in state.poison.fatal})
    if len(members) > 1 and num_generations < 2:
        return 0
    is_redundant = all(find_live_state(state, without={member}) for member in members)
    return 0 if is_redundant else step


def break_guard(state: ControllerState) -> None:
    """The generation that was to save the state before a step is over, and the survivors hold the
    state: break uploads that will never complete."""
    guarded = (state.poison.guarded_step - 1, state.generation)
    broken = break_uploads(state, lambda u: bool(u.pending) and (u.step, u.generation) == guarded)
    if broken and isinstance(state.phase, Aborting) and state.phase.is_hang:
        state.poison.unguarded_step = state.poison.guarded_step


def _num_microbatches(state: ControllerState) -> int:
    """The number of microbatches of the step, or evaluation, that has ended members."""
    job = state.job
    if not state.poison.is_fatal_evaluation:
        return job.num_microbatches
    return -(-job.num_eval_samples // job.microbatch) if job.microbatch else 0


def _suspects(state: ControllerState) -> list[set[int]]:
    """For each generation that was in the fatal step, the microbatches of its lost members."""
    if state.poison.fatal_step != state.committed_step + 1:
        return []
    by_generation: dict[int, set[int]] = {}
    for generation, ran in state.poison.fatal:
        by_generation.setdefault(generation, set()).update(ran)
    return list(by_generation.values())


def _samples(state: ControllerState, microbatches: list[int]) -> str:
    """The samples of these microbatches, by their indices in the data if those are known."""
    job = state.job
    size = job.microbatch
    if not size:
        return "its samples"
    positions = [position for m in microbatches for position in range(m * size, (m + 1) * size)]
    if state.poison.is_fatal_evaluation:
        return f"held-out samples {_spans([p for p in positions if p < job.num_eval_samples])}"
    ids = batch_ids(
        state.poison.fatal_step,
        job.num_microbatches * size,
        state.rollbacks.skipped_batches,
        job.updates_per_batch,
    )
    if not job.num_samples:
        return f"the samples at positions {_spans([ids[p] for p in positions])} of the sample order"
    indices = {sample_of(job.seed, ids[position], job.num_samples) for position in positions}
    return f"training samples {_spans(sorted(indices))}"


def _spans(numbers: list[int]) -> str:
    """Ascending numbers, with consecutive ones joined into ranges."""
    firsts = [n for n in numbers if n - 1 not in numbers]
    lasts = [n for n in numbers if n + 1 not in numbers]
    ends = zip(firsts, lasts, strict=True)
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in ends)
