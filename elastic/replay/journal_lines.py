"""Journal lines: which events are written, so that steps cost few bytes and a replay stays short.

Reports that lead to no command, above all committed steps, are held back for up to `HOLD_S`: their
senders repeat them to a restarted controller, and the metrics have each step. Then the cheaper of
two is written: the held reports, or the core's full state after them. A replay begins at the newest
full state (invariant 10), which is written after each `Resume` and often enough that few events
follow it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from elastic.controller.stragglers import shortened
from elastic.duties.snapshots import has_snapshots
from elastic.protocol.commands import Command, RecordStep, Resume
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import ComputeTimed, Event, Progressed, Quiesced, StepCommitted
from elastic.protocol.pending_commands import PendingCommands
from elastic.protocol.phases import Aborting, Forming, Resharding
from elastic.protocol.step_records import RecordsSent
from elastic.protocol.wire import command_line, event_line, state_line, steps_line

HOLD_S = 30.0
MAX_HELD = 1000
"""Fewer than a worker keeps to repeat."""
MAX_REPLAYED = 2000
"""After events of this replay cost another full state is due; later if the state is large."""
NUM_KEPT_RECORDS = 4096
STEP_BYTES, RECORD_BYTES = 190, 260
"""Approximate size of a step in a line of steps, and in `metrics.jsonl`."""
TIME_BYTES, TIMES_BYTES_A_STEP = 20, 8
"""Approximate size of a member's time in a line of `ComputeTimed`, and the bytes per step that all
members' times may take; beyond that only the times of stragglers are written."""

JournalLine = dict[str, Any]
HELD = (StepCommitted, Progressed, ComputeTimed)
SILENT = (RecordStep,)
"""Commands that need no journal line: their event says the same."""


def replay_cost(event: Event, commands: Sequence[Command]) -> int:
    """The cost of replaying an event, in plain events. A report may carry over a thousand steps, or
    let the core commit as many steps without records."""
    num_carried = len(event.records) if isinstance(event, RecordsSent | Quiesced) else 0
    num_committed = sum(isinstance(command, RecordStep) for command in commands)
    return max(1, num_carried, num_committed)


class JournalWriter:
    """Decides which lines are written; the shell writes them. It has no clock and no files."""

    def __init__(
        self,
        unfinished: PendingCommands | None = None,
        records: Iterable[RecordStep] = (),
        num_replayed: int = 0,
    ) -> None:
        """`num_replayed` is the replay cost of the journal since its newest full state."""
        self.unfinished = unfinished or PendingCommands()
        self._records: deque[RecordStep] = deque(records, maxlen=NUM_KEPT_RECORDS)
        self._num_events = num_replayed
        self._held: list[tuple[float, StepCommitted | Progressed | ComputeTimed]] = []
        self._held_bytes = 0
        self._state_bytes = 1 << 12
        self._now = 0.0
        self._compute_s: tuple[float, ...] = ()
        self._timed = (0, 0)
        """Generation and step of the newest `ComputeTimed` that is written with all times."""
        self._generation = 0
        """The newest generation of which a step is written."""
        self._snapshot_generation = 0
        """The newest generation of which a step with whole snapshots is written."""

    def before(
        self, event: Event, state: ControllerState, num_waiting: int = 0
    ) -> list[JournalLine]:
        """The lines that must precede `event`, which the core has not handled yet.

        `num_waiting` is how many of the newest lines of metrics storage has not taken.
        """
        if isinstance(event, HELD):
            return []
        return self._release(state, num_waiting)

    def after(
        self,
        now: float,
        event: Event,
        commands: Sequence[Command],
        state: ControllerState,
        num_waiting: int = 0,
    ) -> list[JournalLine]:
        """The lines of an event and its commands, which have not been carried out yet."""
        written_commands = [command for command in commands if not isinstance(command, SILENT)]
        compute_s = event.compute_s if isinstance(event, ComputeTimed) else None
        if isinstance(event, ComputeTimed) and not self._has_room_for_times(event):
            event = shortened(state, event)
        lines: list[JournalLine] = []
        if not isinstance(event, HELD) or written_commands or self._is_first(event, state):
            lines = [event_line(now, event, state)]
            lines += [command_line(now, command, state) for command in written_commands]
        # The calls above may raise; the writer's own state changes only from here on.
        self._now = now
        self._num_events += replay_cost(event, commands)
        self.unfinished.note(event, commands)
        records = [command for command in commands if isinstance(command, RecordStep)]
        self._records.extend(records)
        if isinstance(event, ComputeTimed):
            self._compute_s = compute_s or ()
            self._timed = (event.generation, event.step) if event.compute_s else self._timed
        if isinstance(event, StepCommitted):
            self._generation = max(self._generation, event.generation)
            if has_snapshots(state):
                self._snapshot_generation = max(self._snapshot_generation, event.generation)
        if isinstance(event, HELD) and not lines:
            self._hold(now, event)
            return []
        lines = [*self._held_lines(), *lines]
        if any(isinstance(command, Resume) for command in written_commands):
            self._compute_s = ()  # times of the former generation, in another order
            lines.append(self._full(state, num_waiting + len(records)))
        return lines

    def _has_room_for_times(self, event: ComputeTimed) -> bool:
        """Whether all members' times may be written for readers: in a generation's first report,
        and later if they take few bytes per step."""
        generation, step = self._timed
        allowed_bytes = TIMES_BYTES_A_STEP * (event.step - step)
        is_first = event.generation > generation
        return is_first or TIME_BYTES * len(event.compute_s) <= allowed_bytes

    def _hold(self, now: float, event: StepCommitted | Progressed | ComputeTimed) -> None:
        """Write this event later, if no full state comes first."""
        self._held.append((now, event))
        if isinstance(event, StepCommitted):
            self._held_bytes += STEP_BYTES
        else:
            line = event_line(now, event, ControllerState(generation=event.generation))
            self._held_bytes += len(json.dumps(line))

    def _is_first(self, event: Event, state: ControllerState) -> bool:
        """Whether a step is written at once: the first of a generation, and the first with whole
        snapshots. So readers see when training begins and when the state is protected."""
        if not isinstance(event, StepCommitted):
            return False
        is_first_placement = event.generation > self._snapshot_generation and has_snapshots(state)
        return event.generation > self._generation or is_first_placement

    def full_state(self, now: float, state: ControllerState, num_waiting: int = 0) -> JournalLine:
        """The full state, whether or not it is due."""
        self._now = max(now, self._now)
        return self._full(state, num_waiting)

    def due(self, now: float, state: ControllerState, num_waiting: int = 0) -> list[JournalLine]:
        """The lines to write now, after all commands have been carried out."""
        if self._held:
            is_due = len(self._held) >= MAX_HELD or now - self._held[0][0] >= HOLD_S
            return self._release(state, num_waiting) if is_due else []
        max_cost = max(MAX_REPLAYED, (self._state_bytes + num_waiting * RECORD_BYTES) // 100)
        is_calm = (
            not isinstance(state.phase, Forming | Resharding | Aborting) or state.steps.catch_up
        )
        if self._num_events < max_cost or not is_calm:
            return []
        return [self._full(state, num_waiting)]

    def _release(self, state: ControllerState, num_waiting: int) -> list[JournalLine]:
        """The held events, in the form that takes fewer bytes."""
        full_bytes = self._state_bytes + num_waiting * RECORD_BYTES
        if self._held_bytes < full_bytes:
            return self._held_lines()
        return [self._full(state, num_waiting)]

    def _held_lines(self) -> list[JournalLine]:
        """The held events as lines, with consecutive steps in one line."""
        held, self._held, self._held_bytes = self._held, [], 0
        lines: list[JournalLine] = []
        steps: list[tuple[float, StepCommitted]] = []
        for now, event in held:
            if isinstance(event, StepCommitted):
                steps.append((now, event))
                continue
            lines += [steps_line(steps)] if steps else []
            lines.append(event_line(now, event, ControllerState(generation=event.generation)))
            steps = []
        return lines + ([steps_line(steps)] if steps else [])

    def _full(self, state: ControllerState, num_records: int) -> JournalLine:
        """The full state, with everything else that a replay from here on needs."""
        self._held, self._held_bytes = [], 0
        self._num_events = 0
        self.unfinished.drop_ended(state.membership.records.keys())
        records = list(self._records)[-num_records:] if num_records else []
        unwritten_records = [asdict(command.record) for command in records]
        line = state_line(self._now, state, self.unfinished, unwritten_records, self._compute_s)
        self._state_bytes = len(json.dumps(line)) - RECORD_BYTES * len(unwritten_records)
        return line
