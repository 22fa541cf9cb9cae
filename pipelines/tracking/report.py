"""What MLflow shows of a run beside its metrics: tags, a note, a table of events, files."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS, MLFLOW_RUN_NOTE

from pipelines.run_folder import RECIPE, TIMELINE, RunFolder
from pipelines.view.history import History
from pipelines.view.membership import Happening
from pipelines.view.timeline import render
from pipelines.view.wording import shortened

EVENTS_FILE = "events.json"
NUM_NOTED = 20
NOT_NOTED = ("ready", "starting", "checkpoint", "evaluated")
COLUMNS = ("time", "told", "event", "worker", "node", "cause", "step", "generation", "world_size")


def tags(history: History) -> dict[str, str]:
    """What a person filters and sorts runs by, and the note on the run's page."""
    membership, progress = history.membership, history.progress
    goodput = history.goodput()
    told = {
        "elastic.outcome": membership.outcome or membership.phase,
        "elastic.layout": membership.layout,
        "elastic.generation": str(membership.generation),
        "elastic.workers_lost": str(membership.num_lost),
        "elastic.workers_joined": str(membership.num_joined),
        "elastic.steps_redone": str(progress.num_redone),
        "elastic.goodput": "" if goodput is None else f"{goodput:.4f}",
        MLFLOW_RUN_NOTE: note(history),
        MLFLOW_LOGGED_ARTIFACTS: json.dumps([{"path": EVENTS_FILE, "type": "table"}]),
    }
    return {name: value for name, value in told.items() if value}


def note(history: History) -> str:
    """The run in a few lines of Markdown: how it stands, and its newest events."""
    membership = history.membership
    lines = [f"**{membership.outcome or membership.phase}** · {history.summary()}", ""]
    events = [h for h in membership.happenings if h.kind not in NOT_NOTED]
    lines += ["| time (UTC) | step | |", "|---|---|---|"]
    for happening in reversed(events[-NUM_NOTED:]):
        told = shortened(happening.text, 150).replace("|", "\\|")
        lines.append(f"| {_clock(happening.time)[:19]} | {happening.step} | {told} |")
    if len(events) > NUM_NOTED:
        lines += ["", f"The newest {NUM_NOTED} of {len(events)} events; all are in {EVENTS_FILE}."]
    return "\n".join(lines)


def events_table(history: History) -> dict[str, list[Any]]:
    """Every event with its cause, in the form that `mlflow.load_table` and the page read."""
    return {"columns": list(COLUMNS), "data": [_event(h) for h in history.membership.happenings]}


def write_files(history: History, folder: RunFolder, target: Path) -> None:
    """Put everything that is shown as a file into `target`: copies, since the originals grow."""
    (target / EVENTS_FILE).write_text(json.dumps(events_table(history)))
    render(history, folder.name, target / TIMELINE)
    with open(target / folder.journal.name, "wb") as copy:
        copy.writelines(folder.journal.blocks())
    recipe = folder.recipe()
    if recipe is not None:
        (target / RECIPE).write_text(json.dumps(recipe, indent=1))


def _event(happening: Happening) -> list[Any]:
    return [
        _clock(happening.time),
        happening.text,
        happening.kind,
        happening.worker,
        happening.node,
        happening.cause,
        happening.step,
        happening.generation,
        happening.world_size,
    ]


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(sep=" ", timespec="milliseconds")[:23]
