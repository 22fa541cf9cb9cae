"""The tracker: follows a run's files and delivers every line to MLflow."""

from __future__ import annotations

import time
from collections.abc import Callable

from actors.storage.credentials import without_credentials
from pipelines.observe.history.formatting import counted
from pipelines.observe.history.history import History
from pipelines.observe.history.history_file import FollowedHistory, load_history
from pipelines.observe.history.run_folder import RunFolder, default_tracking_uri
from pipelines.observe.tracking.attempts import Attempts
from pipelines.observe.tracking.delivery import Delivery
from pipelines.observe.tracking.store import prepare_process

POLL_S = 2.0
"""The longest delivery of one poll; the next poll continues."""
FIRST_REPORT_S, REPORT_EVERY_S = 15.0, 60.0
SAVE_EVERY_S = 60.0
REPORT_SHARE = 0.01
"""The largest share of the time for reports, whose files grow with the run."""


class Tracker:
    """Delivers one run to one MLflow store; meant for its own process.

    Call `poll` every few seconds and `finish` at the end. Neither raises when the store is
    down: the run's files are the spool, and `tracking.json` records what is delivered.
    """

    def __init__(
        self,
        folder: RunFolder,
        tracking_uri: str | None = None,
        experiment: str = "elastic",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        prepare_process()
        self.uri = tracking_uri or default_tracking_uri(folder.storage)
        self._folder = folder
        self._clock = clock
        self._followed: FollowedHistory | None = None
        self._delivery = Delivery(folder, self.uri, experiment, clock)
        self._reads, self._rows, self._reports, self._saves = (Attempts(clock) for _ in range(4))
        self._next_report = clock() + FIRST_REPORT_S
        self._next_save = clock() + FIRST_REPORT_S

    @property
    def history(self) -> History:
        """The history of the run as far as its files have been read."""
        return self._followed.history if self._followed else History()

    @property
    def trouble(self) -> str:
        """The reason why nothing is delivered at present, in one line, or empty."""
        return self._reads.failure or self._rows.failure or self._reports.failure

    def poll(self) -> None:
        """Deliver new lines if the store accepts them; blocks for a few seconds at most.

        A fast run has written more lines before a delivery ends, so a report does not wait for
        the last one.
        """
        if self._try_rows(self._clock() + POLL_S) and self._clock() >= self._next_report:
            self._try_report()

    def finish(self, patience_s: float) -> str | None:
        """Deliver the rest and the run's end; return a line about what is undelivered, or None.

        Retries for `patience_s`; one more request may be in progress then.
        """
        deadline = self._clock() + patience_s
        for attempts in (self._reads, self._rows, self._reports):
            attempts.reset()
            attempts.longest_pause_s = 1.0
        self.follow()
        self._save()
        is_ended = False
        while self.history.membership.sessions or self._reads.failure:
            if self._try_rows(deadline) and not self._delivery.num_waiting():
                is_ended = is_ended or self._try_end()
            if is_ended and self._try_report():
                return None
            if self._clock() >= deadline:
                return self._shortfall(is_ended)
            time.sleep(0.1)
        return None

    def follow(self) -> bool:
        """Read the new lines of the run's files; return whether the storage answered."""
        return self._attempt(self._reads, self._follow)

    def _follow(self) -> None:
        if self._followed is None:
            self._followed = load_history(self._folder)
        self._followed.follow()
        if self._clock() >= self._next_save:
            self._save()

    def _save(self) -> None:
        """Renew `history.json`; if the storage fails, try again later."""
        if self._followed is not None:
            self._saves.run(self._followed.save)
            self._next_save = self._clock() + SAVE_EVERY_S

    def _try_rows(self, until: float) -> bool:
        """Deliver lines, if there are any, until a deadline; return whether the store took them."""
        if not self.follow():
            return False
        if not self.history.membership.sessions:
            return False
        return self._attempt(self._rows, lambda: self._delivery.rows(self.history, until))

    def _try_end(self) -> bool:
        return self._attempt(self._rows, lambda: self._delivery.end(self.history))

    def _try_report(self) -> bool:
        begun = self._clock()
        if not self._attempt(self._reports, lambda: self._delivery.report(self.history)):
            return False
        pause_s = (self._clock() - begun) / REPORT_SHARE
        self._next_report = self._clock() + max(REPORT_EVERY_S, pause_s)
        return True

    def _attempt(self, attempts: Attempts, work: Callable[[], None]) -> bool:
        is_done = attempts.run(work)
        if attempts.failure:
            self._delivery.close()
        return is_done

    def _shortfall(self, is_ended: bool) -> str:
        missing = ["unreadable lines"] if self._reads.failure else []
        num_waiting = 0 if missing else self._delivery.num_waiting()
        missing += [counted(num_waiting, "line")] if num_waiting else []
        missing += [] if is_ended else ["the run's end"]
        where, folder = without_credentials(self.uri), self._folder.url
        return (
            f"MLflow at {where} still lacks {', '.join([*missing, 'the last report'])} of this run"
            f" ({self.trouble or 'out of time'}); everything is stored in {folder}: repeat the"
            " command with the same run name when MLflow answers"
        )
