"""`elastic logs`: what a worker printed and raised, and what became of it, from the storage."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from actors.worker.worker_output import KEPT_BYTES, STREAMS, kept_name
from pipelines.observe.history.formatting import by_number
from pipelines.observe.history.membership import Membership
from pipelines.observe.history.run_folder import RunFolder, Tail, find_run
from pipelines.settings.errors import UserError

RAYS_OWN = (":job_id:", ":actor_name:", ":task_name:")
"""Lines that Ray writes into a worker's output for its own use begin so."""
NAMES = {"out": "standard output", "err": "standard error"}


def logs(run_name: str, worker: str, storage: str) -> Iterator[str]:
    """Line by line: its happenings, its exceptions, and the kept ends of its output.

    Raises `UserError` for a run or worker that is not there.
    """
    folder = find_run(run_name, storage)
    membership, raised = Membership(), []
    try:
        for line in Tail(folder.journal).drain():
            membership.take(line)
            if line.get("event") == "WorkerRaised" and line["worker"] == worker:
                raised.append(line)
        told = {run_event.worker for run_event in membership.run_events if run_event.worker}
        known = {*membership.places, *membership.starting, *told}
        if worker not in known:
            raise UserError(
                f"run '{run_name}' has had no worker '{worker}'; it has had: "
                f"{', '.join(sorted(known, key=by_number)) or 'none'}"
            )
        kept = {stream: _read(folder, worker, stream) for stream in STREAMS}
    except OSError as error:
        raise UserError(f"{folder.url}: cannot be read ({error})") from None
    for run_event in membership.run_events:
        if run_event.worker == worker:
            yield f"{_clock(run_event.time)}  {run_event.text}"
    for line in raised:
        yield f"{_clock(line['time'])}  {worker} raised {line['message']}"
        yield from line["traceback"].splitlines()
    for stream, text in kept.items():
        yield from _told(NAMES[stream], text)


def _read(folder: RunFolder, worker: str, stream: str) -> str | None:
    try:
        return folder.files.read(kept_name(worker, stream)).decode(errors="replace")
    except FileNotFoundError:
        return None


def _told(name: str, text: str | None) -> Iterator[str]:
    lines = [line for line in (text or "").splitlines() if not line.startswith(RAYS_OWN)]
    if not lines:
        yield f"-- {name}: nothing is kept"
        return
    cut = len(text or "") >= KEPT_BYTES
    yield f"-- {name}" + (f", its newest {KEPT_BYTES >> 10} KiB" if cut else "")
    yield from lines


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")
