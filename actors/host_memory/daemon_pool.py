"""A pool of threads that does not keep a process from ending.

The interpreter joins the threads of `concurrent.futures`: one that waits for a hung device would
keep the process alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from weakref import finalize

Task = tuple[Callable[[], None], Future[None]]


class DaemonPool:
    """Runs calls in `num_threads` daemon threads, which end with the pool."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        for number in range(num_threads):
            arguments = (self._tasks,)
            threading.Thread(
                target=_run_tasks, args=arguments, name=f"{name} {number}", daemon=True
            ).start()
            finalize(self, self._tasks.put, None).atexit = False

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run the call; never refuses, and returns at once."""
        done: Future[None] = Future()
        self._tasks.put((call, done))
        return done


def _run_tasks(tasks: SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        call, done = task
        try:
            call()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        del task, call, done
