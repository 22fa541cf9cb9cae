"""The last output of workers whose processes have ended, while their nodes live.

A killed worker cannot copy its output itself. Its node's agent does, or the controller on its node.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from actors.host_memory.daemon_pool import DaemonPool
from actors.worker.worker_output import copy_output

NUM_THREADS = 4
AGENT_PATIENCE_S = 30.0
"""The time for a node without an agent to get one."""


class EndedOutput:
    """The copies in progress. Any thread may call the methods, and none waits for storage."""

    def __init__(self, run_folder: str, own_node: str, agent_of: Callable[[str], Any]) -> None:
        """`agent_of` returns the agent of a node, or None."""
        self._run_folder = run_folder
        self._own_node = own_node
        self._agent_of = agent_of
        self._pool = DaemonPool(NUM_THREADS, "ended output")
        self._num_copies = 0
        self._without_agent: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._num_copies

    def copy(self, worker: str, node: str, files: Mapping[str, Path]) -> None:
        """Begin to copy the output of a worker that has ended from its node's files."""
        if files:
            deadline = time.monotonic() + AGENT_PATIENCE_S
            self._submit(partial(self._copy, worker, node, files, deadline))

    def beat(self) -> None:
        """Try again on nodes that had no agent."""
        with self._lock:
            calls, self._without_agent = self._without_agent, []
        for call in calls:
            self._submit(call)

    def _submit(self, call: Callable[[], None]) -> None:
        """Call on another thread, since Ray's callbacks must wait neither for storage nor Ray."""
        self._track(lambda: self._pool.submit(call))

    def _copy(self, worker: str, node: str, files: Mapping[str, Path], deadline: float) -> None:
        if node == self._own_node:
            try:
                copy_output(self._run_folder, worker, files)
            except OSError as error:
                _report_failure(worker, error)
        elif (agent := self._agent_of(node)) is not None:
            copy = self._track(
                lambda: agent.copy_output.remote(self._run_folder, worker, files).future()
            )
            copy.add_done_callback(partial(_report_agent, worker))
        elif time.monotonic() < deadline:
            again = partial(self._copy, worker, node, files, deadline)
            with self._lock:
                self._without_agent.append(again)

    def _track(self, begin: Callable[[], Future[Any]]) -> Future[Any]:
        with self._lock:
            self._num_copies += 1
        future = begin()
        future.add_done_callback(self._finish)
        return future

    def _finish(self, _: Future[Any]) -> None:
        with self._lock:
            self._num_copies -= 1


def _report_agent(worker: str, copy: Future[None]) -> None:
    error = copy.exception()
    if error is not None:
        _report_failure(worker, error)


def _report_failure(worker: str, error: BaseException) -> None:
    """Say in the controller's own log what is missing: the run does not depend on it."""
    reason = str(error).strip().splitlines()[-1:]
    print(
        f"elastic: the last output of {worker} could not be copied: {''.join(reason)}",
        file=sys.stderr,
        flush=True,
    )
