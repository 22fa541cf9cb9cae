"""Opening a run, and the one-line reason if it cannot be opened or cannot go on."""

from __future__ import annotations

import shlex
import traceback
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from actors.controller.shell import Shell
from actors.controller.start_guard import STORAGE_PATIENCE_S
from actors.storage.errors import DamagedLog, LeaseFilesMissing, LeaseLost, RunRefused
from actors.storage.file_names import JOURNAL
from actors.storage.lease import Lease, claim
from actors.storage.storage import Storage, is_remote
from elastic.protocol.commands import Stopped
from elastic.protocol.events import Event
from elastic.protocol.wire import UnreadableJournal


def open_run(
    run: Storage,
    cluster: str = "",
    actor: str = "",
    due: tuple[tuple[int, Event], ...] = (),
    heir_patience_s: float = STORAGE_PATIENCE_S,
) -> tuple[Lease, Shell]:
    """Claim a run's lease and replay its journal; `cluster` and `actor` as for `claim`,
    `heir_patience_s` as for `Shell`.

    Raises `RunTaken` if another process drives the run, `RunRefused` if it cannot be opened,
    `OSError` if the storage refuses.
    """
    lease = claim(run, cluster, actor)
    try:
        return lease, Shell(run, lease, due, heir_patience_s=heir_patience_s)
    except UnreadableJournal as error:
        lease.release()
        raise RunRefused(
            f"{run.at(JOURNAL).url}: {error}; choose another --run-name, or resume it with the "
            "version that wrote it"
        ) from None
    except (DamagedLog, LeaseFilesMissing) as error:
        lease.release()
        raise RunRefused(
            f"{error}; `{repair_command(run)}` sets the damaged part aside, and the run continues "
            "from its newest whole checkpoint"
        ) from None


def repair_command(run: Storage) -> str:
    """The command that repairs a run."""
    if is_remote(run.url):
        parts = urlsplit(run.url)
        path = PurePosixPath(parts.path)
        storage = parts._replace(path=str(path.parent)).geturl()
    else:
        path = PurePosixPath(run.url)
        storage = str(path.parent)
    return f"elastic doctor {path.name} --storage {shlex.quote(storage)} --repair"


def expected_end(error: Exception, url: str, step: int) -> Stopped | None:
    """The end, with a one-line reason, of a run at `url` whose shell raised `error`; None if the
    error is unexpected."""
    match error:
        case LeaseLost():
            reason = (
                f"another process drives this run now ({error}), and this one has written nothing "
                f"since: let that process continue, or end it and repeat this command"
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
    """The end of a run at `url` whose shell raised `error`; with the traceback if unexpected."""
    text = "".join(traceback.format_exception(error))
    reason = f"the controller failed: {type(error).__name__}: {error}"
    return expected_end(error, url, step) or Stopped("failed", step, reason, text)
