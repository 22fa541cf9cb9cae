"""Whole runs in plain child processes: the product's shell and workers, without Ray."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from users_policy import quiet_policy

from actors.controller.shell import Shell
from actors.local.process_fleet import NODE, ProcessFleet
from actors.runtime.factory import Factory
from actors.runtime.fault_spec import Fault
from actors.runtime.network import ANYWHERE, Network
from actors.storage.lease import claim
from actors.storage.line_logs import LineLog
from actors.storage.storage import Storage, open_storage
from actors.worker.worker_options import WorkerOptions
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Stopped
from elastic.protocol.events import Event, RunOpened, StepCommitted, StopRequested, WorkerLost
from elastic.protocol.policy import Policy
from pipelines.run.program import TrainingProgram
from pipelines.settings import TrainSettings

Strike = Callable[[ProcessFleet], None]
"""Does harm to the processes of a fleet."""


@dataclass
class Outcome:
    """What a run has left behind."""

    stopped: Stopped
    run: Storage

    @property
    def folder(self) -> Path:
        return Path(self.run.url)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return list(LineLog(self.run, "metrics.jsonl").lines())

    @property
    def journal(self) -> list[dict[str, Any]]:
        return list(LineLog(self.run, "journal.jsonl").lines())

    def losses(self) -> dict[int, float]:
        """By step; a step's last line counts."""
        return {line["step"]: line["loss"] for line in self.metrics}

    def told(self, kind: str) -> list[dict[str, Any]]:
        """The journal's lines of one event or command."""
        return [line for line in self.journal if kind in (line.get("event"), line.get("command"))]

    def story(self) -> str:
        """What happened beside steps, for the message of an assertion."""
        skipped_batches = ("StepCommitted", "ComputeTimed")
        lines = [line for line in self.journal if line.get("event") not in skipped_batches]
        return "\n".join(str(line)[:300] for line in lines)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_plainly(
    folder: Path | str,
    settings: TrainSettings,
    workers: int,
    *,
    min_workers: int = 1,
    layout: str = "",
    faults: tuple[Fault, ...] = (),
    due: tuple[tuple[int, Event], ...] = (),
    program: str = "pipelines.run.program:TrainingProgram",
    timeout_s: float = 150.0,
    stop_after_losses: int | None = None,
    environment: dict[str, str] | None = None,
    node_of: Callable[[str], str] = lambda worker: NODE,
    data_folder: str | None = None,
    recipe: str | None = None,
    network: Network = ANYWHERE,
    strikes: Sequence[Strike] = (),
    hear: Callable[[Event], None] = lambda event: None,
    profiled: tuple[int, int] | None = None,
    with_shell: Callable[[Shell], None] = lambda shell: None,
    shell_kind: type[Shell] = Shell,
    **policy: float | str,
) -> Outcome:
    """Train to the end, or to so many lost workers; fails if it takes over `timeout_s`.

    `recipe` is a file and function of one's own. `hear` is called with each event, and
    `with_shell` with the shell before it runs. Each of the `strikes` is done once all snapshots of
    a generation are whole, one a generation.
    """
    kwargs = {"settings": settings.model_dump(mode="json"), "data_folder": data_folder}
    kwargs |= {"recipe": recipe} if recipe else {}
    made = TrainingProgram(**kwargs, device="cpu")
    kwargs |= {"device": "cpu"} if program.startswith("pipelines.") else {}
    rules = rules_of(min_workers, workers, policy)
    run = open_storage(str(folder))
    shell = shell_kind(run, lease := claim(run), due)
    with_shell(shell)
    options = replace(_options(folder, settings, faults, rules, network), profiled=profiled)
    post = _stopping(shell.post, stop_after_losses) if stop_after_losses else shell.post
    post = _striking(_heard(post, hear), due_strikes := [])
    factory = Factory(program, kwargs, environment or {})
    fleet = ProcessFleet(factory, options, post, lease.epoch, node_of)
    due_strikes += [partial(strike, fleet) for strike in strikes]
    guard = threading.Timer(timeout_s, lambda: shell.post(_Overdue()))
    guard.start()
    try:
        opening = RunOpened(0, rules, TargetLayout.parse(layout, workers), job_of(settings, made))
        stopped = shell.run(fleet, opening)
    finally:
        guard.cancel()
    lease.release()
    return Outcome(stopped, run)


def rules_of(min_workers: int, workers: int, changes: dict[str, float | str]) -> Policy:
    """The policy of a test: quicker than that of the product, but patient with a busy machine."""
    return quiet_policy(
        **{
            "min_workers": min_workers,
            "max_workers": workers,
            "quiesce_deadline_s": 3.0,
            "collective_timeout_s": 30.0,
            "growth_settle_s": 0.2,
            **changes,
        }
    )


def _options(
    folder: Path | str,
    settings: TrainSettings,
    faults: tuple[Fault, ...],
    rules: Policy,
    network: Network,
) -> WorkerOptions:
    return WorkerOptions(
        str(folder),
        collective_timeout_s=rules.collective_timeout_s,
        checkpoint_every=settings.checkpoint.every_steps,
        snapshot_every=rules.snapshot_every,
        audit_every=rules.audit_every,
        straggler_every=rules.straggler_every,
        network=network,
        faults=faults,
    )


def job_of(settings: TrainSettings, made: TrainingProgram) -> Job:
    """What the controller is told of the training."""
    specs, shape = made.specs(), made.workload.shape()
    return Job(
        num_microbatches=settings.num_microbatches,
        microbatch=settings.microbatch,
        state_bytes=sum(spec.num_bytes for spec in specs),
        param_bytes=sum(spec.num_bytes for spec in specs if spec.kind == "parameter"),
        steps=settings.steps,
        checkpoint_every=settings.checkpoint.every_steps,
        limits=shape.limits,
        layer_costs=tuple(layer.cost for layer in shape.layers),
        seed=settings.seed,
        num_samples=made.workload.num_samples,
        eval_every=settings.eval_every,
        num_eval_samples=min(settings.eval_samples, made.workload.num_held_out),
    )


def _stopping(post: Callable[[Event], None], num_losses: int) -> Callable[[Event], None]:
    """Ask for a stop once so many workers have been lost."""
    lost: list[Event] = []

    def note(event: Event) -> None:
        post(event)
        if isinstance(event, WorkerLost):
            lost.append(event)
            if len(lost) == num_losses:
                post(StopRequested("enough"))

    return note


def _heard(post: Callable[[Event], None], hear: Callable[[Event], None]) -> Callable[[Event], None]:
    def both(event: Event) -> None:
        post(event)
        hear(event)

    return both


def _striking(
    post: Callable[[Event], None], strikes: list[Callable[[], None]]
) -> Callable[[Event], None]:
    """Do the next of these once all snapshots of another generation are whole."""
    struck: set[int] = set()

    def note(event: Event) -> None:
        post(event)
        if not isinstance(event, StepCommitted) or event.generation in struck or not strikes:
            return
        if event.vote.num_snapshots == event.record.world_size:
            struck.add(event.generation)
            strikes.pop(0)()

    return note


class _Overdue:
    """No event at all: the shell breaks on it, and the test with the shell."""
