"""Webhook notifications: a JSON object when a run has been waiting for long, and when it stops."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pipelines.errors import UserError
from pipelines.observe.history.formatting import duration, shortened
from pipelines.observe.history.history import History
from pipelines.observe.history.run_folder import RunFolder
from pipelines.observe.tracking.attempts import Attempts

REQUEST_TIMEOUT_S = 5.0
MAX_TRIES = 5


class Notifier:
    """Posts to `url`, which is a secret: messages show only its host.

    `look` and `finish` never raise. A notice is tried `MAX_TRIES` times, with growing pauses.
    """

    def __init__(
        self,
        folder: RunFolder,
        url: str,
        after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._url = url
        self._after_s = after_s
        self._clock = clock
        self._opener = build_opener(_NoRedirect)
        self._attempts = Attempts(clock)
        self._notice: dict[str, Any] | None = None
        """The notice to deliver."""
        self._num_tries = 0
        self._waiting_since: float | None = None
        self._seen_at = 0.0
        self._has_notified = False

    def look(self, history: History) -> None:
        """Notify once of each wait of `after_s`, counted from when this process first saw it."""
        since = history.membership.waiting_since
        if since != self._waiting_since:
            self._waiting_since, self._seen_at, self._has_notified = since, self._clock(), False
        waited_s = self._clock() - self._seen_at
        if since is not None and not self._has_notified and waited_s >= self._after_s:
            self._has_notified = True
            reason = history.membership.phase.partition(": ")[2]
            text = f"has been waiting for {duration(waited_s)}: {reason}"
            self._begin("waiting", text, history, waited_s=waited_s, reason=reason)
        self._try()

    def finish(self, history: History, patience_s: float) -> str | None:
        """Notify of the end; return a line about the failure if the notice is not delivered."""
        membership = history.membership
        end = membership.last("stopped")
        outcome = membership.outcome or "failed"
        reason = (
            end.cause if end and membership.outcome else "its controller ended without a reason"
        )
        text = f"{outcome} at step {membership.step}" + (f": {reason}" if reason else "")
        self._begin("stopped", text, history, outcome=outcome, reason=reason)
        self._attempts.longest_pause_s = 1.0
        deadline = self._clock() + patience_s
        while self._notice and self._clock() < deadline:
            self._try()
            time.sleep(0.05)
        if self._attempts.failure:
            host = urlsplit(self._url).hostname
            failure = self._attempts.failure
            return f"--notify: the notice of the run's end did not reach {host} ({failure})"
        return None

    def _begin(self, event: str, text: str, history: History, **more: Any) -> None:
        split = history.account.split()
        self._attempts.reset()
        self._num_tries = 0
        self._notice = {
            "event": event,
            "run": self._folder.name,
            "folder": self._folder.url,
            "time": time.time(),
            "text": shortened(f"run {self._folder.name} {text}", 500),
            "step": history.membership.step,
            "total_steps": history.membership.total_steps,
            "goodput": split.goodput,
            **more,
        }

    def _try(self) -> None:
        if self._notice and (self._attempts.run(self._post) or self._num_tries >= MAX_TRIES):
            self._notice = None

    def _post(self) -> None:
        """Post the notice. Raises `OSError`, whose text does not contain the URL."""
        self._num_tries += 1
        body = json.dumps(self._notice, allow_nan=False).encode()
        request = Request(self._url, body, {"Content-Type": "application/json"})
        try:
            self._opener.open(request, timeout=REQUEST_TIMEOUT_S).close()
        except HTTPError as error:
            raise OSError(f"it answered {error.code}") from None
        except URLError as error:
            raise OSError(str(error.reason)) from None
        except (OSError, HTTPException) as error:
            raise OSError(type(error).__name__) from None


class _NoRedirect(HTTPRedirectHandler):
    """Refuses redirects, which would turn the POST into a GET without a body."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def check_url(url: str) -> str:
    """The URL. Raises `UserError`, which does not show the secret, if it is not http or https."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        is_valid = False
    if not is_valid or "@" in parts.netloc or not url.isascii() or re.search(r"[\s\x00-\x1f]", url):
        raise UserError(
            "--notify: not a plain http or https URL; give a webhook URL that accepts a POST (it "
            "is not shown here, since it may be a secret)"
        )
    return url
