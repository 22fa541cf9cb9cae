"""What some journal lines say in words."""

from __future__ import annotations

from typing import Any

from pipelines.view.wording import duration


def controller_text(name: str, line: dict[str, Any]) -> tuple[str, str]:
    """Of an event in which the controller reports on itself: its kind, and a sentence."""
    match name:
        case "ControllerRestarted":
            away_s = line["time"] - line["stopped_at"]
            return "controller restarted", f"controller restarted after {duration(away_s)}"
        case "ControllerRaised":
            text = f"controller error at {line['place']}: {line['message']}"
            return "controller error", text
    return "controller recovered", f"the controller has recovered at {line['place']}"


def evaluation_text(line: dict[str, Any]) -> str:
    """Of an `Evaluated` line: the held-out loss and the metrics."""
    not_finite = line.get("not_finite", ())

    def shown(name: str, value: float | None, digits: str) -> str:
        if value is not None:
            return format(value, digits)
        return "not finite" if name in not_finite else "nothing counted"

    texts = [f"{name} {shown(name, value, '.4g')}" for name, value in line.get("metrics", ())]
    texts.insert(0, f"held-out loss {shown('loss', line['loss'], '.4f')}")
    return f"{', '.join(texts)} at step {line['step']}"
