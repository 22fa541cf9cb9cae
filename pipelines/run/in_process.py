"""`elastic train --in-process`: one worker on the main thread of this process, for debuggers."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
from rich.console import Console

from actors.controller.run import RunSpec
from actors.local.in_process import run_in_process
from actors.ray_backend.driver import exit_code
from actors.ray_backend.observers import PATIENCE_S as OBSERVER_PATIENCE_S
from actors.storage.errors import RunRefused
from elastic.protocol.events import Event, StopRequested
from pipelines.callbacks.callback_thread import called_back
from pipelines.errors import UserError
from pipelines.observe.history.follow import Follower
from pipelines.observe.history.progress import unit_of
from pipelines.observe.view.display import Display
from pipelines.run.drive import LAST_LINES_S, Interrupts, print_failures
from pipelines.run.plan import RunPlan, TrainRequest, make_plan, store_recipe
from pipelines.run.refusals import parse_layout

NO_DEADLINE_S = 1e9
"""A worker that is paused in a debugger must not miss a deadline."""


def train_in_process(request: TrainRequest, console: Console) -> int:
    """Train as requested in this process, on this thread; return the exit code.

    An exception of the training code is raised here after the run has been saved and its summary
    printed. Raises `UserError`.
    """
    _refuse_other_processes(request)
    # Its first step runs here anyway, where a debugger sees it.
    request = replace(request, workers="1", tries_script=False)
    plan = make_plan(request, torch.cuda.device_count())
    if plan.run.draining_workers:
        raise UserError(
            "--in-process has one worker, which cannot be removed: drop `remove` from --inject"
        )
    plan = replace(plan, run=without_deadlines(plan.run))
    console.print(
        f"run {plan.folder.name}: {plan.folder.url}  ·  MLflow: {plan.tracking_uri}  ·  in this "
        "process",
        soft_wrap=True,
        highlight=False,
    )
    interrupts = Interrupts()
    try:
        return _train(plan, console, interrupts)
    except RunRefused as error:
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        return 128 + (interrupts.number or signal.SIGINT)
    finally:
        interrupts.restore()


def _refuse_other_processes(request: TrainRequest) -> None:
    """Raises `UserError` for options that need more than this process."""
    if request.workers not in (None, "1", "1:1"):
        raise UserError(
            f"--in-process has one worker: drop --workers {request.workers} or --in-process"
        )
    target_layout = parse_layout(request.layout or "")
    if target_layout.num_model_ranks * prod(target_layout.data_axes or (1,)) > 1:
        raise UserError(
            f"--in-process has one worker: drop --layout {request.layout} or --in-process"
        )
    if request.detach:
        raise UserError("--in-process trains in this command: drop --detach or --in-process")


def without_deadlines(run: RunSpec) -> RunSpec:
    """The run without deadlines, and without snapshots, which could not outlive this process."""
    policy = replace(
        run.opening.policy,
        hang_timeout_s=NO_DEADLINE_S,
        first_step_timeout_s=NO_DEADLINE_S,
        form_timeout_s=NO_DEADLINE_S,
        reshard_timeout_s=NO_DEADLINE_S,
        save_timeout_s=NO_DEADLINE_S,
        quiesce_deadline_s=NO_DEADLINE_S,
        quiesce_deadline_cuda_s=NO_DEADLINE_S,
        collective_timeout_s=NO_DEADLINE_S,
        snapshot_every=0,
        straggler_every=0,
    )
    options = replace(run.options, snapshot_every=0, straggler_every=0)
    return replace(run, opening=replace(run.opening, policy=policy), options=options)


@dataclass(frozen=True)
class _InProcessDrive:
    """Stops the run as a `Drive` does."""

    post: Callable[[Event], None]

    def request_stop(self, cause: str) -> None:
        self.post(StopRequested(cause))


def _train(plan: RunPlan, console: Console, interrupts: Interrupts) -> int:
    started, follower = time.time(), Follower(plan.folder)
    follower.history.progress.unit = unit_of(plan.recipe)  # recipe.json may not be stored yet
    plain = Console(file=console.file, force_terminal=False, soft_wrap=True)
    history = follower.history
    display = Display(plain, plan.folder.name, started, history)  # a live panel would fight pdb

    def hear(event: Event, post: Callable[[Event], None]) -> None:
        interrupts.forward(_InProcessDrive(post))
        display.update(time.time(), *follower.take(), trouble=follower.trouble)

    def claimed() -> None:
        store_recipe(plan)
        calls.start()

    with called_back(plan.folder, plan.callbacks, plan.recipe) as calls:
        try:
            ended = run_in_process(plan.run, hear, claimed)
        finally:
            follower.finish(LAST_LINES_S)
        calls.outcome = ended.outcome
        display.update(time.time(), *follower.take(), trouble=follower.trouble)
        console.print(display.summary(time.time()), highlight=False, soft_wrap=True)
        for observer in plan.run.observers:
            if undelivered := observer.make().finish(OBSERVER_PATIENCE_S):
                print(f"elastic: {undelivered}", file=sys.stderr)
    print_failures(calls)
    if ended.error is not None and ended.outcome.outcome not in ("completed", "interrupted"):
        if not isinstance(ended.error, Exception):  # e.g. SystemExit, which would end silently
            message = f"the training code raised {type(ended.error).__name__}: {ended.error}"
            raise RuntimeError(message) from ended.error
        raise ended.error
    if ended.outcome.outcome != "completed":
        print(f"elastic: {ended.outcome.outcome}: {ended.outcome.reason}", file=sys.stderr)
    return exit_code(ended.outcome, interrupts.number)
