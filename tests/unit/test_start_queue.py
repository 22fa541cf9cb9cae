"""The queue of actor starts: in order, each once, and none after a stop or the end."""

from __future__ import annotations

import threading
from functools import partial

from actors.ray_backend.cluster.start_queue import StartQueue

PATIENCE_S = 10.0


class Starts:
    """What was started, and a start that waits until it may be made."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.failures: list[tuple[str, str]] = []
        self.is_under_way, self.may_end = threading.Event(), threading.Event()
        self.are_all_made = threading.Event()
        self.queue = StartQueue(lambda name, error: self.failures.append((name, str(error))))

    def add(self, name: str) -> None:
        self.queue.add(name, partial(self.made.append, name))

    def add_slow(self, name: str) -> None:
        def start() -> None:
            self.is_under_way.set()
            assert self.may_end.wait(PATIENCE_S)
            self.made.append(name)

        self.queue.add(name, start)
        assert self.is_under_way.wait(PATIENCE_S)

    def finish(self) -> list[str]:
        """Let all be made; return their names in order."""
        self.queue.add("last", self.are_all_made.set)
        self.may_end.set()
        assert self.are_all_made.wait(PATIENCE_S)
        self.queue.close(PATIENCE_S)
        return self.made


def test_starts_are_made_in_order_without_those_that_were_cancelled() -> None:
    starts = Starts()
    starts.add_slow("w0")
    for name in ("w1", "w2", "w3"):
        starts.add(name)
    assert starts.queue.cancel("w2")
    assert not starts.queue.cancel("w2") and not starts.queue.cancel("w9")
    assert starts.finish() == ["w0", "w1", "w3"]


def test_cancelling_a_start_under_way_waits_until_it_is_made() -> None:
    starts = Starts()
    starts.add_slow("w0")
    threading.Timer(0.2, starts.may_end.set).start()
    assert not starts.queue.cancel("w0")
    assert starts.made == ["w0"], "now the worker can be stopped"
    starts.finish()


def test_failed_start_is_reported_and_the_next_one_made() -> None:
    starts = Starts()

    def fail() -> None:
        raise ConnectionError("no answer")

    starts.queue.add("w0", fail)
    starts.add("w1")
    assert starts.finish() == ["w1"]
    assert starts.failures == [("w0", "no answer")]


def test_closed_queue_makes_only_the_start_under_way() -> None:
    starts = Starts()
    starts.add_slow("w0")
    starts.add("w1")
    threading.Timer(0.2, starts.may_end.set).start()
    starts.queue.close(PATIENCE_S)
    assert starts.made == ["w0"]
