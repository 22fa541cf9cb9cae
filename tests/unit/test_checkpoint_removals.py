"""Checkpoints that storage refuses to remove once are removed as soon as it answers again."""

from __future__ import annotations

import errno
import queue
import threading
import time
from typing import Any

import pytest
from memory_storage import MemoryStorage

from actors.controller import publisher
from actors.controller.publisher import Publisher
from actors.storage.checkpoint_files import MANIFEST, folder_of
from actors.storage.lease import claim
from elastic.protocol.commands import DropCheckpoints, PublishCheckpoint
from elastic.protocol.controller_events import CheckpointsRemoved, ControllerRaised
from elastic.protocol.events import Checkpointed, Event, PartFailed, PartFile

LATE_S = 30.0


class Removals:
    """A publisher of a run in memory with checkpoints of the steps 1 to 4."""

    def __init__(self) -> None:
        self.run: Any = MemoryStorage()
        for step in range(1, 5):
            for name in (MANIFEST, "part-w0.safetensors"):
                self.run.write(f"{folder_of(step, 1)}/{name}", b"content")
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.publisher = Publisher(self.run, claim(self.run), self.events.put)

    def drop(self, *steps: int) -> None:
        self.publisher.order(DropCheckpoints(tuple((step, 1) for step in steps)))

    def next_event(self) -> Event:
        return self.events.get(timeout=LATE_S)

    def stored_steps(self) -> set[int]:
        return {
            n for n in range(1, 5) if f"{folder_of(n, 1)}/part-w0.safetensors" in self.run.files()
        }


@pytest.fixture
def removals():
    removals = Removals()
    yield removals
    removals.publisher.close()


def refuse_until_tried(removals: Removals, *steps: int, error: Exception) -> None:
    """Order a removal while storage refuses; return once the publisher has tried it."""
    removals.run.refusal = error
    num_before = removals.run.num_removals
    removals.drop(*steps)
    while removals.run.num_removals == num_before:
        time.sleep(0.001)
    removals.run.refusal = None


def test_refused_removal_is_retried_before_the_next_order(removals: Removals) -> None:
    refuse_until_tried(removals, 1, 2, error=OSError(5, "Input/output error"))
    assert removals.stored_steps() == {1, 2, 3, 4}
    removals.drop(3)
    removed = removals.next_event()
    assert isinstance(removed, CheckpointsRemoved)
    assert set(removed.removed) == {(1, 1), (2, 1), (3, 1)}
    assert removals.stored_steps() == {4}


def test_refused_removal_is_retried_at_the_end(removals: Removals) -> None:
    refuse_until_tried(removals, 1, error=OSError(5, "Input/output error"))
    removals.publisher.close()
    assert removals.next_event() == CheckpointsRemoved(((1, 1),))
    assert removals.stored_steps() == {2, 3, 4}


def test_unexpected_exception_forgets_no_removal(removals: Removals) -> None:
    refuse_until_tried(removals, 1, error=ValueError("broken answer"))
    assert isinstance(removals.next_event(), ControllerRaised)
    removals.drop(2)
    removed = removals.next_event()
    while not isinstance(removed, CheckpointsRemoved):
        removed = removals.next_event()
    assert set(removed.removed) == {(1, 1), (2, 1)}


def test_unremovable_checkpoint_does_not_block_the_removal_of_others(removals: Removals) -> None:
    removals.run.unremovable = folder_of(1, 1)
    removals.drop(1, 2)
    removals.drop(3)
    removals.drop(4)
    removals.publisher.close()
    assert removals.stored_steps() == {1}


def publication(step: int, num_bytes: int = 7) -> PublishCheckpoint:
    return PublishCheckpoint(step, 1, (PartFile("part-w0.safetensors", num_bytes, 0),))


def test_publication_does_not_wait_for_queued_removals(removals: Removals) -> None:
    """The removal of a thousand parts may take minutes; a run that ends waits for the manifest."""
    removals.run.gate = gate = threading.Event()
    removals.drop(1, 2, 3)
    while not removals.run.num_removals:
        time.sleep(0.001)
    removals.publisher.order(publication(4))
    gate.set()
    assert isinstance(removals.next_event(), Checkpointed)
    removed = removals.next_event()
    assert isinstance(removed, CheckpointsRemoved)
    assert set(removed.removed) == {(1, 1), (2, 1), (3, 1)}
    assert removals.stored_steps() == {4}


def test_refused_publication_is_retried(removals: Removals) -> None:
    removals.run.refusals = [OSError("slow down"), OSError(errno.EIO, "Input/output error")]
    removals.publisher.order(publication(4))
    event = removals.next_event()
    assert isinstance(event, Checkpointed) and event.step == 4


@pytest.mark.parametrize(
    ("refusal", "num_tries"), [(OSError(errno.ENOSPC, "full"), 1), (OSError("slow down"), 3)]
)
def test_publication_that_storage_goes_on_refusing_is_reported(
    removals: Removals, refusal: OSError, num_tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "PUBLISH_PATIENCE_S", 0.0)
    removals.run.refusals = [refusal] * 9
    removals.publisher.order(publication(4))
    event = removals.next_event()
    assert isinstance(event, PartFailed) and event.cause == str(refusal)
    assert len(removals.run.refusals) == 9 - num_tries


def test_missing_part_is_reported_at_once(removals: Removals) -> None:
    removals.run.remove(f"{folder_of(4, 1)}/part-w0.safetensors")
    removals.publisher.order(publication(4))
    event = removals.next_event()
    assert isinstance(event, PartFailed) and "is missing" in event.cause
