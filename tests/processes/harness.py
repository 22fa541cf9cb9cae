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
from actors.health.health_options import HealthOptions
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

FleetFault = Callable[[ProcessFleet], None]
"""Injects a fault into the processes of a fleet, from outside of them."""


@dataclass
class Outcome:
    """What a run returned, and the files that it wrote."""

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
        """Loss by step; the last line of a step counts."""
        return {line["step"]: line["loss"] for line in self.metrics}

    def lines_of(self, kind: str) -> list[dict[str, Any]]:
        """Return the journal lines of one event or command."""
        return [line for line in self.journal if kind in (line.get("event"), line.get("command"))]

    def story(self) -> str:
        """Return the journal lines other than those of steps, for the message of an assertion."""
        step_events = ("StepCommitted", "ComputeTimed")
        lines = [line for line in self.journal if line.get("event") not in step_events]
        return "\n".join(str(line)[:300] for line in lines)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_in_processes(
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
    fleet_faults: Sequence[FleetFault] = (),
    on_event: Callable[[Event], None] = lambda event: None,
    profiled: tuple[int, int] | None = None,
    on_shell: Callable[[Shell], None] = lambda shell: None,
    shell_kind: type[Shell] = Shell,
    **policy: float | str,
) -> Outcome:
    """Train to the end, or until `stop_after_losses` workers are lost; fail after `timeout_s`.

    `recipe` names the file and function of a custom recipe. The harness calls `on_event` with each
    event, and `on_shell` with the shell before it runs. The shell posts each event of `due` once
    its step has committed. In each generation the harness injects one of the `fleet_faults`, once
    all snapshots of the generation are complete.
    """
    kwargs = {"settings": settings.model_dump(mode="json"), "data_folder": data_folder}
    kwargs |= {"recipe": recipe} if recipe else {}
    training_program = TrainingProgram(**kwargs, device="cpu")
    kwargs |= {"device": "cpu"} if program.startswith("pipelines.") else {}
    run_policy = build_policy(min_workers, workers, policy)
    run = open_storage(str(folder))
    shell = shell_kind(run, lease := claim(run), due)
    on_shell(shell)
    options = replace(
        build_options(folder, settings, faults, run_policy, network), profiled=profiled
    )
    post = _with_stop(shell.post, stop_after_losses) if stop_after_losses else shell.post
    post = _with_fleet_faults(_with_listener(post, on_event), injections := [])
    factory = Factory(program, kwargs, environment or {})
    fleet = ProcessFleet(factory, options, post, lease.epoch, node_of)
    injections += [partial(inject, fleet) for inject in fleet_faults]
    watchdog = threading.Timer(timeout_s, lambda: shell.post(_Overdue()))
    watchdog.start()
    try:
        target, job = TargetLayout.parse(layout, workers), build_job(settings, training_program)
        stopped = shell.run(fleet, RunOpened(0, run_policy, target, job))
    finally:
        watchdog.cancel()
    lease.release()
    return Outcome(stopped, run)


def build_policy(min_workers: int, workers: int, changes: dict[str, float | str]) -> Policy:
    """The policy of a test: shorter deadlines than the defaults, but enough for a busy machine."""
    return quiet_policy(
        **{
            "min_workers": min_workers,
            "max_workers": workers,
            "quiesce_deadline_s": 3.0,
            "collective_timeout_s": 30.0,
            "growth_wait_s": 0.2,
            **changes,
        }
    )


def build_options(
    folder: Path | str,
    settings: TrainSettings,
    faults: tuple[Fault, ...],
    policy: Policy,
    network: Network,
) -> WorkerOptions:
    return WorkerOptions(
        str(folder),
        collective_timeout_s=policy.collective_timeout_s,
        checkpoint_every=settings.checkpoint.every_steps,
        snapshot_every=policy.snapshot_every,
        audit_every=policy.audit_every,
        straggler_every=policy.straggler_every,
        network=network,
        health=HealthOptions(**settings.health.model_dump()),
        faults=faults,
    )


def build_job(settings: TrainSettings, program: TrainingProgram) -> Job:
    """Build what the controller knows about the training."""
    specs, shape = program.specs(), program.workload.shape()
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
        num_samples=program.workload.num_samples,
        eval_every=settings.eval_every,
        num_eval_samples=settings.num_evaluated(program.workload.num_held_out),
        runs_script=program.loop is not None,
    )


def _with_stop(post: Callable[[Event], None], num_losses: int) -> Callable[[Event], None]:
    """Request a stop once `num_losses` workers are lost."""
    lost: list[Event] = []

    def post_and_count(event: Event) -> None:
        post(event)
        if isinstance(event, WorkerLost):
            lost.append(event)
            if len(lost) == num_losses:
                post(StopRequested("enough"))

    return post_and_count


def _with_listener(
    post: Callable[[Event], None], on_event: Callable[[Event], None]
) -> Callable[[Event], None]:
    def post_and_notify(event: Event) -> None:
        post(event)
        on_event(event)

    return post_and_notify


def _with_fleet_faults(
    post: Callable[[Event], None], injections: list[Callable[[], None]]
) -> Callable[[Event], None]:
    """Run the next injection once all snapshots of a further generation are complete."""
    generations: set[int] = set()

    def post_and_inject(event: Event) -> None:
        post(event)
        if (
            not isinstance(event, StepCommitted)
            or event.generation in generations
            or not injections
        ):
            return
        if event.vote.num_snapshots == event.record.world_size:
            generations.add(event.generation)
            injections.pop(0)()

    return post_and_inject


class _Overdue:
    """An object that is no event: the shell raises on it, and so the test fails."""
