"""One measurement of `long_run.py` in a separate process; prints one JSON object.

long_run_child.py restart URL | status URL RUN | memory FOLDER NUM_STEPS
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import psutil
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from long_runs import (
    NUM_WORKERS,
    POLICY,
    Every,
    answers_to,
    opening,
    parts_of,
    reports_after,
    step_of,
)

from actors.controller.shell import Shell
from actors.storage.checkpoint_files import folder_of
from actors.storage.lease import claim
from actors.storage.storage import open_storage
from elastic.protocol.commands import (
    Command,
    Form,
    Order,
    RecordStep,
    Reshard,
    Resume,
    StartStore,
    StartWorkers,
)
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import PartWritten
from pipelines.observe.view.status import status

ACTOR = "long-run"
MEMBERS = tuple(f"w{number}" for number in range(NUM_WORKERS))
EVERY = Every(checkpoint=900)
AHEAD = 512
TIMEOUT_S = 600.0


class Crew:
    """A simulated fleet whose workers answer at once and outlive their controller."""

    def __init__(self) -> None:
        self.shell: Shell
        self.heard_at = 0.0
        self.attached_at = 0.0

    def _answer(self, command: Command) -> None:
        for event in answers_to(command, 0):
            self.shell.post(event)

    def start_store(self) -> None:
        self._answer(StartStore())

    def start_workers(self, command: StartWorkers) -> None:
        self._answer(command)

    def send(self, workers: Iterable[str], order: Order) -> None:
        if isinstance(order, Form | Reshard):
            self._answer(order)

    def newest_generation(self) -> int:
        self.heard_at = time.perf_counter()
        return 0

    def attach(self, state: ControllerState) -> None:
        self.attached_at = time.perf_counter()

    def end_survivors(self) -> None:
        """Nothing to do: the run starts without leftovers."""

    def stop_worker(self, worker: str) -> None:
        raise AssertionError(f"{worker} is healthy")

    def start_snapshot_server(self, node: str) -> None:
        """Nothing to do: snapshots are disabled."""

    def stop_snapshot_server(self, node: str) -> None:
        """Nothing to do: snapshots are disabled."""

    def query_snapshot_servers(self, nodes: Sequence[str], generation: int) -> None:
        """Nothing to do: snapshots are disabled."""

    def forget_snapshots(self, nodes: Sequence[str], generation: int, kept_generation: int) -> None:
        """Nothing to do: snapshots are disabled."""

    def probe(self, worker: str) -> Future[int]:
        answer: Future[int] = Future()
        answer.set_result(1)
        return answer

    def probe_snapshot_server(self, node: str) -> Future[None]:
        raise AssertionError("there are no snapshot servers")

    def close(self) -> None:
        """Nothing to do: nothing was started."""


def restart(url: str) -> dict[str, float]:
    """Seconds from the start of a controller, after its imports, to its first actions."""
    began = time.perf_counter()
    run = open_storage(url)
    crew = Crew()
    crew.shell = Shell(run, claim(run, actor=ACTOR))
    replayed = time.perf_counter()
    state = crew.shell._core.state
    step, generation = state.committed_step, state.generation
    with crew.shell.listening() as commands:
        threading.Thread(
            target=crew.shell.run, args=(crew, opening(10**9), crew), daemon=True
        ).start()
        assert crew.shell.opened.wait(TIMEOUT_S)
        crew.shell.post(step_of(step + 1, generation, time.time()))
        command = commands.get(timeout=TIMEOUT_S)
        while not isinstance(command, RecordStep):
            command = commands.get(timeout=TIMEOUT_S)
    now = time.perf_counter()
    assert command.record.step == step + 1
    return {
        "replayed_s": replayed - began,
        "heard_s": crew.heard_at - began,
        "running_s": now - began,
        "step": step,
    }


def show_status(url: str, run_name: str) -> dict[str, float]:
    """Seconds of `elastic status`, after its imports."""
    began = time.perf_counter()
    with redirect_stdout(StringIO()) as out:
        code = status(run_name, url, (), watch=False, as_json=True, console=Console())
    taken_s = time.perf_counter() - began
    assert code == 0
    return {"status_s": taken_s, "step": json.loads(out.getvalue())["step"]}


def memory(folder: str, num_steps: int) -> dict[str, float]:
    """The growth of a controller's memory from a fifth of the steps to their end."""
    run = open_storage(folder)
    crew = Crew()
    crew.shell = shell = Shell(run, claim(run, actor=ACTOR))
    opened = opening(10**9, POLICY, EVERY)
    with shell.listening() as commands:
        threading.Thread(target=shell.run, args=(crew, opened, crew), daemon=True).start()
        while not isinstance(commands.get(timeout=TIMEOUT_S), Resume):
            continue
        done = sent = 0
        first, began = (0, 0), time.perf_counter()
        while done < num_steps:
            for step in range(sent + 1, min(done + AHEAD, num_steps) + 1):
                committed = step_of(step, 1, time.time())
                shell.post(committed)
                for event in reports_after(committed, NUM_WORKERS, EVERY):
                    shell.post(event)
                if committed.vote.saves(EVERY.checkpoint):
                    for part in parts_of(committed, MEMBERS):
                        _write_part(folder, part)
                        shell.post(part)
                sent = step
            done += isinstance(commands.get(timeout=TIMEOUT_S), RecordStep)
            if done == num_steps // 5 and first == (0, 0):
                first = _memory_in_use()
        last, taken_s = _memory_in_use(), time.perf_counter() - began
    num_more = num_steps - num_steps // 5
    return {
        "blocks_per_step": (last[0] - first[0]) / num_more,
        "bytes_per_step": (last[1] - first[1]) / num_more,
        "step_us": 1e6 * taken_s / num_steps,
    }


def _write_part(folder: str, part: PartWritten) -> None:
    """Write the file that the event reports."""
    checkpoint = Path(folder) / folder_of(part.step, part.generation)
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / part.file.name).write_bytes(bytes(part.file.num_bytes))


def _memory_in_use() -> tuple[int, int]:
    """Python's allocated blocks, and resident bytes."""
    gc.collect()
    return sys.getallocatedblocks(), psutil.Process().memory_info().rss


def main() -> None:
    kind, where, *rest = sys.argv[1:]
    match kind:
        case "restart":
            result = restart(where)
        case "status":
            result = show_status(where, rest[0])
        case _:
            result = memory(where, int(rest[0]))
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
