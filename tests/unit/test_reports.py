"""A worker's reports: in order, steps together, and again to a controller that has restarted."""

from __future__ import annotations

import threading
import time
from typing import Any

from actors.ray_backend.reports import STEPS_EVERY_S, Reports
from elastic.protocol.events import Event, GroupFormed, Paused, StepCommitted
from elastic.protocol.votes import StepRecord, Vote


class ReceivingController:
    """A controller's handle that keeps the messages which it is sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, tuple[Event, ...]]] = []
        self.report = self
        self.arrived = threading.Condition()

    def remote(self, incarnation: int, *events: Event) -> None:
        with self.arrived:
            self.messages.append((incarnation, events))
            self.arrived.notify_all()

    def await_events(self, num_events: int) -> list[Event]:
        def received() -> list[Event]:
            return [event for _, events in self.messages for event in events]

        with self.arrived:
            assert self.arrived.wait_for(lambda: len(received()) >= num_events, timeout=20.0)
            return received()


def committed(step: int) -> StepCommitted:
    record = StepRecord(0.0, step, 1, 1, 1.0, 1, 0.1, 1.0, 0.001, skipped=False)
    return StepCommitted(1, record, Vote(step, 1.0, 1, 1.0, 1))


def test_quick_steps_are_sent_together_and_in_order() -> None:
    controller = ReceivingController()
    reports = Reports(controller, incarnation=1)
    steps = [committed(step) for step in range(1, 301)]
    began = time.monotonic()
    for event in steps:
        reports.add(event)
    spent_s = time.monotonic() - began
    assert controller.await_events(len(steps)) == steps
    assert len(controller.messages) <= 2 + spent_s / STEPS_EVERY_S


def test_any_other_event_is_sent_at_once_after_the_steps_before_it() -> None:
    controller = ReceivingController()
    reports = Reports(controller, incarnation=1)
    events: list[Any] = [GroupFormed("w0", 1), committed(1), committed(2), Paused("w0", 1, 2)]
    for event in events:
        reports.add(event)
    assert [event for _, sent in controller.messages for event in sent] == events


def test_restarted_controller_gets_what_waits_and_what_it_lacks_once() -> None:
    controller = ReceivingController()
    reports = Reports(controller, incarnation=1)
    for step in (1, 2, 3):
        reports.add(committed(step))
    reports.repeat(incarnation=2, committed_step=1)
    assert controller.messages[-1] == (2, (committed(2), committed(3)))
    num_messages = len(controller.messages)
    time.sleep(3 * STEPS_EVERY_S)
    assert len(controller.messages) == num_messages
