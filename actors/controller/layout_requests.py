"""Layout requests to a running run: post one and follow it to its end. Runs without Ray."""

from __future__ import annotations

import queue
import time
import uuid
from dataclasses import dataclass, replace

from actors.controller.shell import Shell
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.commands import Command, Resume, Stopped
from elastic.protocol.events import LayoutRequested
from elastic.protocol.notes import LayoutAnswered, Resharded

LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class LayoutReply:
    """The progress of a request; the fields of later stages are empty until it reaches them.

    A request is done at once if it is refused, if the layout is the present one, or if nothing
    trains. Else it is done once `resharded` and `layout` describe the generation that trains now.
    """

    answered: LayoutAnswered | None = None
    resharded: Resharded | None = None
    layout: str = ""
    ended: bool = False
    """Whether the run ended before the request was done."""

    @property
    def is_done(self) -> bool:
        answer = self.answered
        if answer is None:
            return self.ended or bool(self.layout)
        changes = not answer.refusal and answer.present not in ("", answer.planned)
        return self.ended or bool(self.layout) or not changes


def send_layout_request(
    shell: Shell, target_layout: TargetLayout, patience_s: float
) -> LayoutReply:
    """Post the request and follow it to its end, for at most `patience_s`."""
    request, reply = uuid.uuid4().hex, LayoutReply()
    deadline = time.monotonic() + patience_s
    # An event posted before the run is opened would belong to an earlier session.
    shell.opened.wait(patience_s)
    with shell.listening() as commands:
        shell.post(LayoutRequested(request, target_layout))
        while not reply.is_done and time.monotonic() < deadline:
            try:
                reply = _updated(reply, commands.get(timeout=LOOK_EVERY_S), request)
            except queue.Empty:
                reply = replace(reply, ended=shell.ended.is_set())
    return reply


def _updated(reply: LayoutReply, command: Command, request: str) -> LayoutReply:
    match command:
        case LayoutAnswered() if command.request == request:
            return replace(reply, answered=command)
        case Resharded() if reply.answered and command.generation > reply.answered.generation:
            return replace(reply, resharded=command)
        case Resume() if reply.resharded and command.generation == reply.resharded.generation:
            return replace(reply, layout=command.layout)
        case Stopped():
            return replace(reply, ended=True)
    return reply
