"""The report of a run in MLflow: tags, a note, a table of events and files."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS, MLFLOW_RUN_NOTE

from pipelines.observe.history.formatting import shortened
from pipelines.observe.history.history import History
from pipelines.observe.history.run_events import RunEvent
from pipelines.observe.history.run_folder import RECIPE, TIMELINE, RunFolder
from pipelines.observe.view.timeline import render

EVENTS_FILE = "events.json"
NUM_NOTED = 20
NOT_NOTED = ("ready", "starting", "checkpoint", "evaluated")
COLUMNS = ("time", "text", "event", "worker", "node", "cause", "step", "generation", "world_size")


def tags(history: History) -> dict[str, str]:
    """Tags by which people filter and sort runs, and the note on the run's page."""
    membership, progress = history.membership, history.progress
    goodput = history.goodput()
    values = {
        "elastic.outcome": membership.outcome or membership.phase,
        "elastic.layout": membership.layout,
        "elastic.generation": str(membership.generation),
        "elastic.workers_lost": str(membership.num_lost),
        "elastic.workers_joined": str(membership.num_joined),
        "elastic.steps_redone": str(progress.num_redone),
        "elastic.steps_skipped": str(progress.num_skipped),
        "elastic.goodput": "" if goodput is None else f"{goodput:.4f}",
        MLFLOW_RUN_NOTE: note(history),
        MLFLOW_LOGGED_ARTIFACTS: json.dumps([{"path": EVENTS_FILE, "type": "table"}]),
    }
    return {name: value for name, value in values.items() if value}


def note(history: History) -> str:
    """The note in Markdown: the run's status in one line, and its newest events."""
    membership = history.membership
    lines = [f"**{membership.outcome or membership.phase}** · {history.summary()}", ""]
    events = [h for h in membership.run_events if h.kind not in NOT_NOTED]
    lines += ["| time (UTC) | step | event |", "|---|---|---|"]
    for run_event in reversed(events[-NUM_NOTED:]):
        text = shortened(run_event.text, 150).replace("|", "\\|")
        lines.append(f"| {_clock(run_event.time)[:19]} | {run_event.step} | {text} |")
    if len(events) > NUM_NOTED:
        lines += ["", f"The newest {NUM_NOTED} of {len(events)} events; all are in {EVENTS_FILE}."]
    return "\n".join(lines)


def events_table(history: History) -> dict[str, list[Any]]:
    """Every event with its cause, in the format of `mlflow.load_table` and MLflow's page."""
    return {"columns": list(COLUMNS), "data": [_event(h) for h in history.membership.run_events]}


def write_files(history: History, folder: RunFolder, target: Path) -> None:
    """Write the files of the report into `target`: copies, since the originals grow."""
    (target / EVENTS_FILE).write_text(json.dumps(events_table(history)))
    render(history, folder.name, target / TIMELINE)
    with open(target / folder.journal.name, "wb") as copy:
        copy.writelines(folder.journal.blocks())
    recipe = folder.recipe()
    if recipe is not None:
        (target / RECIPE).write_text(json.dumps(recipe, indent=1))


def _event(run_event: RunEvent) -> list[Any]:
    return [
        _clock(run_event.time),
        run_event.text,
        run_event.kind,
        run_event.worker,
        run_event.node,
        run_event.cause,
        run_event.step,
        run_event.generation,
        run_event.world_size,
    ]


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(sep=" ", timespec="milliseconds")[:23]
