"""Loss monitor: counts skipped steps and rolls the run back after a loss spike."""

from __future__ import annotations

from elastic.duties.rollback import order_rollback, rollback_obstacle
from elastic.protocol.commands import Command, RecordStep
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Evaluated
from elastic.protocol.notes import Warned
from elastic.protocol.phases import Ending
from elastic.protocol.votes import StepRecord


def commit(state: ControllerState, record: StepRecord) -> list[Command]:
    """Commit one step: record it, and react to its numbers if they are known."""
    state.commit(record.step)
    if record.missing:
        state.losses.skipped_since = None  # it may have been applied
        return [RecordStep(record)]
    return [RecordStep(record), *_count_skipped(state, record), *_watch_loss(state, record)]


def warn_of_evaluation(event: Evaluated) -> list[Command]:
    """Warn of held-out numbers that are not finite, or that count nothing."""
    commands: list[Command] = []
    if event.not_finite:
        names = ", ".join("held-out loss" if n == "loss" else n for n in event.not_finite)
        text = f"{names} of step {event.step}: not finite"
        commands.append(Warned(event.generation, event.step, "not finite", text))
    if event.loss is None and "loss" not in event.not_finite:
        text = f"the evaluation of step {event.step} counted nothing: it has no held-out loss"
        commands.append(Warned(event.generation, event.step, "nothing counted", text))
    return commands


def _count_skipped(state: ControllerState, record: StepRecord) -> list[Command]:
    """End the run after too many skipped steps in a row: its parameters no longer change."""
    if not record.skipped:
        state.losses.skipped_since = None
        return []
    if state.losses.skipped_since is None:
        state.losses.skipped_since = record.step
    max_skipped = state.policy.max_skipped
    if max_skipped and record.step - state.losses.skipped_since + 1 >= max_skipped:
        steps = f"steps {state.losses.skipped_since} to {record.step} were"
        cause = "a loss or gradient" if record.lr is not None else "the learning rate"
        limit = f"loss_monitor.max_skipped={max_skipped}"
        ending = f"{steps} all skipped: {cause} was not finite ({limit})"
        state.ending = state.ending or Ending("failed", ending)
    reason = "a loss or gradient was not finite" if record.tokens else "its batch had no tokens"
    if record.lr is None:
        reason = "the learning rate was not finite"
    return [_warned(state, record, "skipped", f"step {record.step} was skipped: {reason}")]


def _watch_loss(state: ControllerState, record: StepRecord) -> list[Command]:
    """Roll back to before a loss spike and skip the batches from there on (Chowdhery et al., PaLM,
    2022, section 5.1)."""
    factor, window = state.policy.spike_factor, state.policy.spike_window
    if not factor or record.loss is None or record.skipped or state.rollbacks.request:
        return []
    losses = sorted(loss for _, loss in state.losses.recent)
    median = losses[len(losses) // 2] if losses else 0.0
    is_spike = 2 * len(losses) >= window and record.loss > factor * median > 0
    commands = _roll_back(state, record, median) if is_spike else []
    if not state.rollbacks.request:
        state.losses.recent = [*state.losses.recent, (record.step, record.loss)][-window:]
    return commands


def _roll_back(state: ControllerState, record: StepRecord, median: float) -> list[Command]:
    """Order a rollback. If that is impossible, or happened too often, the run continues, with one
    warning for each spike."""
    limit = record.step - 1
    numbers = f"{record.loss:.4g} after a median of {median:.4g}"
    cause = f"the loss of step {record.step} spiked: {numbers}"
    obstacle = rollback_obstacle(state, limit)
    if not obstacle and order_rollback(state, limit, cause, record.step):
        return [_warned(state, record, "spike", cause)]
    is_new, state.losses.spiked_step = state.losses.spiked_step < limit, record.step
    obstacle = obstacle or f"{state.policy.max_rollbacks} rollbacks have not helped"
    return [_warned(state, record, "spike", f"{cause}; {obstacle}")] if is_new else []


def _warned(state: ControllerState, record: StepRecord, kind: str, text: str) -> Command:
    return Warned(state.generation, record.step, kind, text)
