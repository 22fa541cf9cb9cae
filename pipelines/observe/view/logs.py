"""`elastic logs`: the events, exceptions and output of one worker, read from the storage."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from actors.worker.worker_output import KEPT_BYTES, STREAMS, kept_name
from pipelines.errors import UserError
from pipelines.observe.history.formatting import by_number
from pipelines.observe.history.membership import Membership
from pipelines.observe.history.run_folder import RunFolder, Tail, find_run

RAYS_OWN = (":job_id:", ":actor_name:", ":task_name:")
"""Prefixes of lines that Ray writes into a worker's output for its own use."""
NAMES = {"out": "standard output", "err": "standard error"}


def logs(run_name: str, worker: str, storage: str) -> Iterator[str]:
    """The worker's events, its exceptions and the stored end of its output, line by line.

    Raises `UserError` for an unknown run or worker.
    """
    folder = find_run(run_name, storage)
    membership, raised = Membership(), []
    try:
        for line in Tail(folder.journal).drain():
            membership.take(line)
            if line.get("event") == "WorkerRaised" and line["worker"] == worker:
                raised.append(line)
        named = {run_event.worker for run_event in membership.run_events if run_event.worker}
        workers = {*membership.places, *membership.starting, *named}
        if worker not in workers:
            raise UserError(
                f"run '{run_name}' has no worker '{worker}'; its workers are: "
                f"{', '.join(sorted(workers, key=by_number)) or 'none'}"
            )
        output = {stream: _read(folder, worker, stream) for stream in STREAMS}
    except OSError as error:
        raise UserError(f"{folder.url}: cannot be read ({error})") from None
    for run_event in membership.run_events:
        if run_event.worker == worker:
            yield f"{_clock(run_event.time)}  {run_event.text}"
    for line in raised:
        yield f"{_clock(line['time'])}  {worker} raised {line['message']}"
        yield from line["traceback"].splitlines()
    for stream, text in output.items():
        yield from _output_lines(NAMES[stream], text)


def _read(folder: RunFolder, worker: str, stream: str) -> str | None:
    try:
        return folder.files.read(kept_name(worker, stream)).decode(errors="replace")
    except FileNotFoundError:
        return None


def _output_lines(name: str, text: str | None) -> Iterator[str]:
    lines = [line for line in (text or "").splitlines() if not line.startswith(RAYS_OWN)]
    if not lines:
        yield f"-- {name}: empty"
        return
    is_cut = len(text or "") >= KEPT_BYTES
    yield f"-- {name}" + (f", newest {KEPT_BYTES >> 10} KiB" if is_cut else "")
    yield from lines


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")
