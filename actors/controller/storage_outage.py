"""Storage outages: what waits for storage, and what is lost if a run ends during one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from actors.storage.line_writers import CLOSE_PATIENCE_S, Lines
from elastic.protocol.commands import Stopped
from elastic.protocol.events import PartFailed


def waiting_for_storage(unsaved: PartFailed | None, logs: Mapping[str, Lines]) -> str:
    """What waits for storage, and why; empty if nothing does. `unsaved` is a failed checkpoint."""
    waiting = [f"the checkpoint of step {unsaved.step}"] if unsaved else []
    causes = [unsaved.cause] if unsaved else []
    for name, lines in logs.items():
        if lines.trouble:
            waiting += [counted_lines(lines.num_waiting, name)] if lines.num_waiting else [name]
            causes.append(lines.trouble)
    return f"{', '.join(waiting)} ({causes[-1]})" if waiting else ""


def counted_lines(num_lines: int, name: str) -> str:
    return f"{num_lines:,} {'line' if num_lines == 1 else 'lines'} of {name}"


def close_logs(logs: Iterable[Lines], patience_s: float = CLOSE_PATIENCE_S) -> str:
    """Close all logs within `patience_s`; return which lines were not written, or ""."""
    deadline = time.monotonic() + patience_s
    unwritten = [lines.close(max(0.0, deadline - time.monotonic())) for lines in logs]
    return "; ".join(part for part in unwritten if part)


def with_shortfall(outcome: Stopped, unwritten: str) -> Stopped:
    """The outcome with the lost lines; a run that loses its last lines is not complete."""
    if not unwritten:
        return outcome
    kind = "failed" if outcome.outcome == "completed" else outcome.outcome
    reason = "; ".join(part for part in (outcome.reason, unwritten) if part)
    return replace(outcome, outcome=kind, reason=reason)
