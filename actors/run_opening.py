"""Opening a run: its lease and its journal, or one line that says why it cannot be opened."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from actors.errors import DamagedLog, LostLease, RunRefused
from actors.file_names import JOURNAL
from actors.lease import Lease, claim
from actors.shell import Shell
from actors.storage import Storage, is_remote
from elastic.events import Event
from elastic.wire import UnreadableJournal


def open_run(
    run: Storage, cluster: str = "", actor: str = "", due: tuple[tuple[int, Event], ...] = ()
) -> tuple[Lease, Shell]:
    """Claim a run and replay its journal; `cluster` and `actor` as for `claim`.

    Raises `RunTaken` if somebody drives it, `RunRefused` if it cannot be opened, `OSError` if the
    storage refuses.
    """
    lease = claim(run, cluster, actor)
    try:
        return lease, Shell(run, lease, due)
    except UnreadableJournal as error:
        lease.release()
        raise RunRefused(
            f"{run.at(JOURNAL).url}: {error}; choose another --run-name, or resume it with the "
            "version that wrote it"
        ) from None
    except (DamagedLog, LostLease) as error:
        lease.release()
        raise RunRefused(f"{error}; {way_on(run)}") from None


def way_on(run: Storage) -> str:
    """How a run with damaged files is continued."""
    return (
        f"`{repair_command(run)}` sets the damaged part aside, and the run continues from its "
        "newest whole checkpoint"
    )


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
