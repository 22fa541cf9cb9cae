"""A queue for the starts of named actors: Ray answers each only after milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable


class StartQueue:
    """Makes starts in order, on a thread of its own, so that no caller waits for a thousand of
    them. Any thread may call the methods."""

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        """`failed` learns of each start that raised."""
        self._failed = failed
        self._waiting: dict[str, Callable[[], None]] = {}
        self._current = ""
        self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, name="starts", daemon=True).start()

    def add(self, name: str, start: Callable[[], None]) -> None:
        with self._changed:
            self._waiting[name] = start
            self._changed.notify_all()

    def cancel(self, name: str) -> bool:
        """Drop a start that waits, and return True. If it is under way, wait until it is made."""
        with self._changed:
            if self._waiting.pop(name, None) is not None:
                return True
            self._changed.wait_for(lambda: self._current != name)
            return False

    def close(self, patience_s: float) -> None:
        """Drop all starts that wait; wait at most `patience_s` for one that is under way."""
        with self._changed:
            self._waiting.clear()
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._current, patience_s)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                self._current = next(iter(self._waiting))
                start = self._waiting.pop(self._current)
            try:
                start()
            except Exception as error:
                self._failed(self._current, error)
            finally:
                with self._changed:
                    self._current = ""
                    self._changed.notify_all()
