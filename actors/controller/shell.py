"""The controller's shell: it opens a run or takes it over, and processes events to its end."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import Any

from actors.controller.fleet import Fleet, Survivors
from actors.controller.journal import is_step_line, newest_rows
from actors.controller.session import ControllerSession, close_logs, with_shortfall
from actors.controller.shell_parts import ShellParts
from actors.controller.start_guard import FIRST_PATIENCE_S, STORAGE_PATIENCE_S, StartGuard
from actors.storage.file_names import METRICS
from actors.storage.lease import Lease
from actors.storage.line_logs import LineLog
from actors.storage.storage import Storage
from elastic.controller.controller_errors import MAX_IN_A_ROW
from elastic.protocol.commands import DropCheckpoints, Resume, Stopped
from elastic.protocol.controller_events import ControllerRaised, ControllerRestarted
from elastic.protocol.events import Event, RunOpened, Woke, WorkerReady
from elastic.protocol.wire import FORMAT, command_line, metrics_row


class Shell(ControllerSession):
    """Drives one run to its end; `post` may be called from any thread."""

    def __init__(
        self,
        run: Storage,
        lease: Lease,
        due: tuple[tuple[int, Event], ...] = (),
        parts: ShellParts | None = None,
        heir_patience_s: float = STORAGE_PATIENCE_S,
    ) -> None:
        """`due` are events to post once their step has committed; `parts` are those of a real run
        by default. A restarted controller waits so long for storage while it takes the run over."""
        super().__init__(run, lease, due, parts)
        patience_s = heir_patience_s if self._is_heir() else FIRST_PATIENCE_S
        counted = self._core.state.errors.counts.keys()
        sleep, monotonic = self._parts.sleep, self._parts.monotonic
        self._survivor_generation = 0
        """The newest generation of survivors that were not taken over."""
        self._start_guard = StartGuard(run.url, patience_s, counted, sleep, monotonic)
        self.opened = threading.Event()
        """Set once posted events belong to this session of the run."""
        self.ended = threading.Event()
        """Set once the shell processes no more events, for whatever reason."""

    @property
    def trouble(self) -> str:
        """What currently waits for storage, and why; empty if nothing does."""
        return self._start_guard.trouble or super().trouble

    def run(self, fleet: Fleet, opening: RunOpened, survivors: Survivors | None = None) -> Stopped:
        """Open the run, or take over what an earlier controller of the same actor left alive, and
        process events until the run has stopped. This fills in `opening.saved`."""
        parts, state = self._parts, self._core.state
        self._fleet = fleet
        silence_s = opening.policy.silence_timeout_s
        self._detector = parts.open_detector(fleet, self.post, state, silence_s)
        self._publisher = parts.open_publisher(self._run, self._lease, self.post)
        self._lease.start_renewing()
        self._compactor = parts.open_compactor(self._run, self._lease)
        try:
            self._start(opening, survivors)
            self.opened.set()
            while self.outcome is None:
                if (forced := self._guarded.forced_end(self._now)) is not None:
                    self._serve_forced(forced)
                    break
                self._take(self._guarded.next(self._next_event))
        finally:
            self.ended.set()
            unwritten = self._close()
        assert self.outcome is not None, "the loop ends with an outcome"
        return with_shortfall(self.outcome, unwritten)

    def _next_event(self) -> Event:
        look_every_s = self._parts.look_every_s
        while True:
            deadline = self._core.next_deadline()
            now = self._clock.now()
            if deadline is not None and deadline <= now and self._inbox.empty():
                return Woke()
            patience_s = look_every_s if deadline is None else deadline - now
            try:
                return self._inbox.get(timeout=min(max(patience_s, 0.0), look_every_s))
            except queue.Empty:
                self._look_after()
                if self._guarded.is_failing:
                    return Woke()

    def _start(self, opening: RunOpened, survivors: Survivors | None) -> None:
        """Open the run or take it over, guarded like an event. Raises `RunRefused`."""
        attempt, missing_lines = self._start_guard.attempt, deque[dict[str, Any]]()
        attempt("journal", lambda: missing_lines.extend(self._missing_lines()))
        attempt("journal", partial(self._write_all, missing_lines))
        attempt("journal", self._journal.make_durable)  # before commands are repeated
        attempt("metrics", self._complete_metrics)
        if survivors and self._can_take_over(survivors):
            self._take_over(survivors)
        else:
            if survivors:
                attempt("survivors", survivors.end_survivors)
            if not attempt(RunOpened.__name__, partial(self._open, opening)):
                self._give_up_opening()
        for event in self._start_guard.events:
            self.post(event)

    def _give_up_opening(self) -> None:
        """End the run: this session has nothing yet that could be saved."""
        raised = [e for e in self._start_guard.events if isinstance(e, ControllerRaised)][-1]
        reason = f"the controller failed {MAX_IN_A_ROW} times in a row at {raised.place}"
        step = self.committed_step
        stopped = Stopped("failed", step, f"{reason}: {raised.message}", raised.traceback)
        self._serve_forced(stopped)

    def _close(self) -> str:
        """End everything, whatever raises on the way; return which lines were not written."""
        unwritten: list[str] = []
        with ExitStack() as closing:
            closing.callback(self._lease.stop_renewing)
            closing.callback(lambda: unwritten.append(close_logs((self._journal, self._metrics))))
            if self._compactor:
                closing.callback(self._compactor.close)
            closing.callback(self._publisher.close)
            closing.callback(self._fleet.close)
            closing.callback(self._detector.close)
        return "".join(unwritten)

    def _open(self, opening: RunOpened) -> None:
        if self._is_heir() and self._before.stopped:
            self.outcome = self._before.stopped  # that controller died before it reported the end
            return
        checkpoints = self._parts.find_checkpoints(self._run)
        newest = LineLog(self._run, METRICS).last_rows(1)
        generations = [row["generation"] for row in newest if is_step_line(row)]
        generations += [checkpoints.newest_generation, self._survivor_generation]
        for complaint in checkpoints.complaints:
            self._journal.write({"time": self._clock.now(), "warning": complaint, "format": FORMAT})
        self.post(
            dataclasses.replace(
                opening,
                incarnation=self._lease.epoch,
                saved=checkpoints.whole,
                newest_generation=max(generations),
            )
        )
        # The publisher's answer belongs to this session, so it must not come before `RunOpened`.
        self._publisher.order(DropCheckpoints(checkpoints.unfinished))

    def _is_heir(self) -> bool:
        """Whether a controller of the same actor wrote the journal's last lines."""
        return self._lease.since <= self._core.state.incarnation

    def _can_take_over(self, survivors: Survivors) -> bool:
        """Whether the survivors match the journal: on an object store it may lack the last second,
        and with it a generation."""
        if not self._is_heir() or self._before.stopped:
            return False
        generations: list[int] = []

        def query() -> None:
            generations.append(survivors.newest_generation())

        if not self._start_guard.attempt("survivors", query):
            return True  # the failure ends the run, and the survivors' state must be saved
        [self._survivor_generation] = generations
        return self._survivor_generation <= self._core.state.generation

    def _take_over(self, survivors: Survivors) -> None:
        """Take over the survivors, and repeat the commands that may not have been executed."""
        state, again = self._core.state, self._before.commands_to_repeat()
        attempt = self._start_guard.attempt
        self.post(ControllerRestarted(self._lease.epoch, self._before.now))
        for worker in sorted(state.membership.warm):
            record = state.membership.records[worker]
            self._detector.note(WorkerReady(worker, record.node, record.pid))
        attempt("survivors", partial(survivors.attach, state))
        for command in again:
            attempt(type(command).__name__, partial(self._execute, command))

    def _missing_lines(self) -> list[dict[str, Any]]:
        """The lines of the last event's commands, if the last writer died before it wrote them."""
        commands, now = self._before.missing_commands(), self._before.now
        lines = [command_line(now, command, self._core.state) for command in commands]
        if any(isinstance(command, Resume) for command in commands):
            lines.append(self._writer.full_state(now, self._core.state))
        return lines

    def _complete_metrics(self) -> None:
        """Write the metrics lines that only the journal has, and note those that it lacks."""
        rows = newest_rows(LineLog(self._run, METRICS), self._before)
        written = {(row["generation"], row["step"]) for row in rows}
        records = self._before.records
        while records:  # each once, even if one raises and this is repeated
            record = records[0].record
            if (record.generation, record.step) not in written:
                self._metrics.write(metrics_row(record))
            records.popleft()
        known_step = self._core.state.committed_step
        generation = self._core.state.generation
        self._ahead = {key for key in written if key[0] <= generation and key[1] > known_step}
