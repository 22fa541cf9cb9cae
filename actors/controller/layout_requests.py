"""Ask a run that goes on for another layout, and wait for what becomes of it; runs without Ray."""

from __future__ import annotations

import queue
import time
import uuid
from dataclasses import dataclass, replace

from actors.controller.shell import Shell
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.commands import Command, LayoutAnswered, Resharded, Resume, Stopped
from elastic.protocol.events import LayoutRequested

LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class LayoutReply:
    """How far a request has come; later fields are empty where it has not come so far.

    Unless it is refused, already so, or nothing trains, it is done once `relaid` and `layout`
    tell of the generation that trains now.
    """

    answered: LayoutAnswered | None = None
    resharded: Resharded | None = None
    layout: str = ""
    ended: bool = False
    """The run has ended before."""

    @property
    def is_done(self) -> bool:
        told = self.answered
        changes = told is not None and not told.refusal and told.present not in ("", told.planned)
        return self.ended or bool(self.layout) or (told is not None and not changes)


def ask_for_layout(shell: Shell, target_layout: TargetLayout, patience_s: float) -> LayoutReply:
    """Post the request and follow it to its end, or as far as it comes within `patience_s`."""
    request, reply = uuid.uuid4().hex, LayoutReply()
    deadline = time.monotonic() + patience_s
    # What is posted before the run is opened would be of an earlier session.
    shell.opened.wait(patience_s)
    with shell.listening() as told:
        shell.post(LayoutRequested(request, target_layout))
        while not reply.is_done and time.monotonic() < deadline:
            try:
                reply = _taken(reply, told.get(timeout=LOOK_EVERY_S), request)
            except queue.Empty:
                reply = replace(reply, ended=shell.ended.is_set())
    return reply


def _taken(reply: LayoutReply, command: Command, request: str) -> LayoutReply:
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
