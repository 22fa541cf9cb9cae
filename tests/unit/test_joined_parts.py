"""Reports of one checkpoint that wait together are one event."""

from __future__ import annotations

import queue

import pytest

from actors.controller.shell_parts import JoinedInbox
from elastic.protocol.events import Event, PartFile, PartWritten, Woke


def part(worker: str, step: int = 5, generation: int = 1) -> PartWritten:
    return PartWritten(worker, generation, step, PartFile(f"part-{worker}", 10, 0))


def taken(*events: Event) -> list[Event]:
    """The events that an inbox gives for these."""
    inbox = JoinedInbox(queue.Queue())
    for event in events:
        inbox.put(event)
    received = []
    while not inbox.empty():
        received.append(inbox.get(timeout=0.0))
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.0)
    return received


def test_parts_of_one_checkpoint_are_joined_in_order() -> None:
    (joined,) = taken(part("w0"), part("w1"), part("w2"))
    assert isinstance(joined, PartWritten)
    assert [worker for worker, _ in joined.parts] == ["w0", "w1", "w2"]
    assert joined.parts[2] == ("w2", PartFile("part-w2", 10, 0))


def test_events_between_parts_keep_their_place() -> None:
    first, woke, second, third = taken(part("w0"), part("w1"), Woke(), part("w2"), part("w3", 6))
    assert isinstance(first, PartWritten) and len(first.parts) == 2
    assert woke == Woke()
    assert second == part("w2"), "another step does not join"
    assert third == part("w3", 6)


def test_a_part_alone_is_unchanged() -> None:
    assert taken(part("w0")) == [part("w0")]
    assert taken(part("w0"), part("w1", generation=2)) == [part("w0"), part("w1", generation=2)]
