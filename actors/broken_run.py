"""How a run ends whose controller's shell cannot go on: in one line where the cause is known."""

from __future__ import annotations

import traceback

from actors.errors import LeaseLost, RunRefused
from elastic.commands import Stopped


def told_in_one_line(error: Exception, url: str, step: int) -> Stopped | None:
    """The end of a run at `url` for a reason that is no bug; None for any other exception."""
    match error:
        case LeaseLost():
            reason = (
                f"another process drives this run now ({error}), and this one has written nothing "
                f"since: leave it to that process, or end that process and repeat this command"
            )
        case RunRefused():
            reason = str(error)
        case OSError():
            cause = " ".join(str(error).split()) or type(error).__name__
            reason = f"{url}: storage does not answer ({cause}); the same command resumes the run"
        case _:
            return None
    return Stopped("failed", step, reason)


def outcome_of(error: Exception, url: str, step: int) -> Stopped:
    """The end of a run at `url` whose shell has raised this."""
    text = "".join(traceback.format_exception(error))
    reason = f"the controller broke: {type(error).__name__}: {error}"
    return told_in_one_line(error, url, step) or Stopped("failed", step, reason, text)
