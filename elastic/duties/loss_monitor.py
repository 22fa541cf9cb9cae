"""What the numbers of a committed step lead to: skipped steps are counted, losses watched."""

from __future__ import annotations

from elastic.duties.rollback import order_rollback, shortfall
from elastic.protocol.commands import Command, RecordStep, Warned
from elastic.protocol.controller_state import CoreState
from elastic.protocol.events import Evaluated
from elastic.protocol.phases import Ending
from elastic.protocol.votes import StepRecord


def commit(state: CoreState, record: StepRecord) -> list[Command]:
    """One more step stands: its line, and what is to be told of its numbers, if they are known."""
    state.commit(record.step)
    if record.missing:
        return [RecordStep(record)]
    return [RecordStep(record), *_count_skipped(state, record), *_watch_loss(state, record)]


def warn_of_evaluation(event: Evaluated) -> list[Command]:
    """Held-out numbers that are not finite, or that nothing was counted for, are reported."""
    commands: list[Command] = []
    if event.not_finite:
        names = ", ".join("held-out loss" if n == "loss" else n for n in event.not_finite)
        text = f"{names} of step {event.step}: not finite"
        commands.append(Warned(event.generation, event.step, "not finite", text))
    if event.loss is None and "loss" not in event.not_finite:
        text = f"the evaluation of step {event.step} counted nothing: it has no held-out loss"
        commands.append(Warned(event.generation, event.step, "nothing counted", text))
    return commands


def _count_skipped(state: CoreState, record: StepRecord) -> list[Command]:
    """So many in a row end the run: its parameters stay as they are, whatever it reads."""
    if not record.skipped:
        state.skipped_since = None
        return []
    if state.skipped_since is None:
        state.skipped_since = record.step
    most = state.policy.max_skipped
    if most and record.step - state.skipped_since + 1 >= most:
        which = f"steps {state.skipped_since} to {record.step} were"
        what = "a loss or gradient" if record.lr is not None else "the learning rate"
        reason = f"{which} all skipped: {what} was not finite (max_skipped={most})"
        state.ending = state.ending or Ending("failed", reason)
    why = "a loss or gradient was not finite" if record.tokens else "it had no tokens"
    if record.lr is None:
        why = "the learning rate was not finite"
    return [_warned(state, record, "skipped", f"step {record.step} was skipped: {why}")]


def _watch_loss(state: CoreState, record: StepRecord) -> list[Command]:
    """A spike takes the run back to before it, and the batches from there on are left out
    (Chowdhery et al., PaLM, 2022, section 5.1)."""
    factor, window = state.policy.spike_factor, state.policy.spike_window
    if not factor or record.loss is None or record.skipped or state.rollback:
        return []
    losses = sorted(loss for _, loss in state.recent_losses)
    median = losses[len(losses) // 2] if losses else 0.0
    is_spike = 2 * len(losses) >= window and record.loss > factor * median > 0
    commands = _go_back(state, record, median) if is_spike else []
    if not state.rollback:
        state.recent_losses = [*state.recent_losses, (record.step, record.loss)][-window:]
    return commands


def _go_back(state: CoreState, record: StepRecord, median: float) -> list[Command]:
    """Where the run cannot, or has done so too often, it goes on; that is told once a spike."""
    limit = record.step - 1
    told = f"{record.loss:.4g} after a median of {median:.4g}"
    cause = f"the loss of step {record.step} spiked: {told}"
    why_not = shortfall(state, limit)
    if not why_not and order_rollback(state, limit, cause, record.step):
        return [_warned(state, record, "spike", cause)]
    is_new, state.spiked_step = state.spiked_step < limit, record.step
    why_not = why_not or f"going back {state.policy.max_rollbacks} times has not helped"
    return [_warned(state, record, "spike", f"{cause}; {why_not}")] if is_new else []


def _warned(state: CoreState, record: StepRecord, kind: str, text: str) -> Command:
    return Warned(state.generation, record.step, kind, text)
