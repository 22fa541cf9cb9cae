"""`elastic train --in-process`: one worker on this process's main thread, for debuggers."""

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
from pipelines.observe.history.follow import Follower
from pipelines.observe.view.display import Display
from pipelines.run.drive import LAST_LINES_S, Interrupts
from pipelines.run.plan import RunPlan, TrainRequest, make_plan, store_recipe
from pipelines.run.refusals import parse_layout
from pipelines.settings.errors import UserError

FOR_EVER_S = 1e9
"""Who stands in a debugger is not late."""


def train_in_process(request: TrainRequest, console: Console) -> int:
    """Train what is asked for in this process, on this thread; return the exit code.

    What the training's own code raises is raised here once the run has been saved and told of.
    Raises `UserError`.
    """
    _refuse_others(request)
    plan = make_plan(replace(request, workers="1"), torch.cuda.device_count())
    if plan.run.draining_workers:
        raise UserError("--in-process: there is nobody to go on when the one worker is removed")
    plan = replace(plan, run=unhurried(plan.run))
    console.print(
        f"run {plan.folder.name}: {plan.folder.url}  ·  MLflow: {plan.tracking_uri}  ·  process of "
        "this command",
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
        interrupts.give_back()


def _refuse_others(request: TrainRequest) -> None:
    """What needs more than this process."""
    if request.workers not in (None, "1", "1:1"):
        raise UserError(
            f"--in-process has one worker: drop --workers {request.workers}, or the other"
        )
    target_layout = parse_layout(request.layout or "")
    if target_layout.num_model_ranks * prod(target_layout.data_axes or (1,)) > 1:
        raise UserError(
            f"--in-process has one worker: drop --layout {request.layout}, or the other"
        )
    if request.detach:
        raise UserError("--in-process trains in this command: drop --detach, or the other")


def unhurried(run: RunSpec) -> RunSpec:
    """No snapshots, since there is nobody to outlive this process, and no deadlines."""
    policy = replace(
        run.opening.policy,
        hang_timeout_s=FOR_EVER_S,
        first_step_timeout_s=FOR_EVER_S,
        form_timeout_s=FOR_EVER_S,
        reshard_timeout_s=FOR_EVER_S,
        save_timeout_s=FOR_EVER_S,
        quiesce_deadline_s=FOR_EVER_S,
        quiesce_deadline_cuda_s=FOR_EVER_S,
        collective_timeout_s=FOR_EVER_S,
        snapshot_every=0,
        straggler_every=0,
    )
    options = replace(run.options, snapshot_every=0, straggler_every=0)
    return replace(run, opening=replace(run.opening, policy=policy), options=options)


@dataclass(frozen=True)
class _Here:
    """The run as a driver stops it."""

    post: Callable[[Event], None]

    def request_stop(self, cause: str) -> None:
        self.post(StopRequested(cause))


def _train(plan: RunPlan, console: Console, interrupts: Interrupts) -> int:
    started, follower = time.time(), Follower(plan.folder)
    plain = Console(file=console.file, force_terminal=False, soft_wrap=True)
    history = follower.history
    display = Display(plain, plan.folder.name, started, history)  # a live panel would fight pdb

    def hear(event: Event, post: Callable[[Event], None]) -> None:
        interrupts.pass_on(_Here(post))
        display.update(time.time(), *follower.take(), trouble=follower.trouble)

    try:
        ended = run_in_process(plan.run, hear, claimed=lambda: store_recipe(plan))
    finally:
        follower.finish(LAST_LINES_S)
    display.update(time.time(), *follower.take(), trouble=follower.trouble)
    console.print(display.summary(time.time()), highlight=False, soft_wrap=True)
    for observer in plan.run.observers:
        if undelivered := observer.make().finish(OBSERVER_PATIENCE_S):
            print(f"elastic: {undelivered}", file=sys.stderr)
    if ended.error is not None and ended.outcome.outcome not in ("completed", "interrupted"):
        if not isinstance(ended.error, Exception):  # as of `sys.exit()`, which would end unseen
            told = f"the training's code raised {type(ended.error).__name__}: {ended.error}"
            raise RuntimeError(told) from ended.error
        raise ended.error
    if ended.outcome.outcome != "completed":
        print(f"elastic: {ended.outcome.outcome}: {ended.outcome.reason}", file=sys.stderr)
    return exit_code(ended.outcome, interrupts.number)
