"""Publisher of checkpoints: it makes whole ones visible and removes old ones."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from actors.controller.guard import ThreadGuard
from actors.storage.checkpoint_files import MANIFEST, folder_of, publish, set_aside
from actors.storage.errors import LeaseLost
from actors.storage.lease import Lease
from actors.storage.storage import LASTING_ERRORS, Storage, retry
from elastic.protocol.commands import DropCheckpoints, PublishCheckpoint, SetAside
from elastic.protocol.controller_events import CheckpointsRemoved
from elastic.protocol.events import Checkpointed, Event, PartFailed

PUBLISH_PATIENCE_S, PUBLISH_TRIES = 30.0, 3
"""One refusal must not discard the parts of all workers."""
StorageOrder = PublishCheckpoint | DropCheckpoints | SetAside


class Publisher:
    """Publishes and removes checkpoints in a thread, so that the controller never waits for
    storage."""

    def __init__(self, run: Storage, lease: Lease, post: Callable[[Event], None]) -> None:
        self._run = run
        self._lease = lease
        self._post = post
        self._guard = ThreadGuard("publisher", post)
        self._orders: queue.SimpleQueue[StorageOrder | None]
        self._orders = queue.SimpleQueue()
        self._to_publish: queue.SimpleQueue[PublishCheckpoint] = queue.SimpleQueue()
        """Those among the orders: a removal, which may take long, does not delay them."""
        self._to_remove: deque[tuple[int, int]] = deque()
        """Step and generation of the checkpoints to remove; storage may have refused some."""
        self._thread = threading.Thread(target=self._serve, name="publisher", daemon=True)
        self._thread.start()

    def order(self, command: StorageOrder) -> None:
        if isinstance(command, PublishCheckpoint):
            self._to_publish.put(command)
        self._orders.put(command)

    def close(self) -> None:
        """Finish the queued orders, then end the thread."""
        self._orders.put(None)
        self._thread.join()

    def _serve(self) -> None:
        is_open = True
        while is_open:
            order = self._orders.get()
            is_open = order is not None
            if isinstance(order, DropCheckpoints):
                self._to_remove += [k for k in order.dropped if k not in self._to_remove]
            try:
                self._publish_waiting()
                if self._to_remove:
                    self._attempt(self._remove)
                if isinstance(order, SetAside):
                    self._attempt(partial(self._set_aside, order))
            except LeaseLost:
                return  # the shell sees the lost lease, too, and ends the run

    def _attempt(
        self, act: Callable[[], None], fail: Callable[[Exception], None] = lambda error: None
    ) -> None:
        """Run `act` under the lease; on an exception call `fail`. Raises `LeaseLost`."""
        try:
            self._lease.check_now()
            act()
        except LeaseLost:
            raise
        except OSError as error:
            fail(error)
        except Exception as error:
            self._guard.note_error(error)
            fail(error)
        else:
            self._guard.note_success()

    def _publish_waiting(self) -> None:
        while not self._to_publish.empty():
            order = self._to_publish.get()
            self._attempt(partial(self._publish, order), partial(self._fail, order))

    def _publish(self, order: PublishCheckpoint) -> None:
        write = partial(self._write_manifest, order)
        url = retry(write, PUBLISH_PATIENCE_S, PUBLISH_TRIES, LASTING_ERRORS)
        self._post(Checkpointed(order.step, order.generation, url))

    def _write_manifest(self, order: PublishCheckpoint) -> str:
        self._lease.check_now()
        return publish(
            self._run, order.step, order.generation, order.files, order.layout, order.members
        )

    def _remove(self) -> None:
        """Remove checkpoints, the manifest first, so that a half removed checkpoint is invisible.
        If storage refuses, retry with the next order, after the other checkpoints."""
        removed: list[tuple[int, int]] = []
        try:
            while self._to_remove:
                key = self._to_remove[0]
                self._to_remove.rotate(-1)
                self._run.remove(f"{folder_of(*key)}/{MANIFEST}")
                self._run.remove(folder_of(*key))
                removed.append(self._to_remove.pop())
                self._publish_waiting()
        finally:
            if removed:
                self._post(CheckpointsRemoved(tuple(removed)))

    def _set_aside(self, order: SetAside) -> None:
        """Set a damaged checkpoint aside. If storage refuses, the next opening of the run finds the
        damage again."""
        set_aside(self._run.at(folder_of(order.step, order.generation)))
        self._post(CheckpointsRemoved(((order.step, order.generation),)))

    def _fail(self, order: PublishCheckpoint, error: Exception) -> None:
        self._post(PartFailed("", order.generation, order.step, str(error)))
