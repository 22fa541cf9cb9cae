"""Drive a run from the terminal: start it, show it, pass signals on, end with the right code."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from types import FrameType

import torch
from rich.console import Console

from actors.accelerators import NoSuchAccelerator, choose_resources
from actors.errors import ControllerLost, RunRefused, RunTaken
from actors.launch import Drive, close_cluster, exit_code, join_or_start_cluster
from actors.ray_controller import Progress, Run
from actors.ray_private import job_folder
from actors.storage import DiskStorage
from pipelines.errors import UserError
from pipelines.follow import Follower
from pipelines.plan import Asked, Plan, make_plan, store_recipe
from pipelines.run_folder import named_storage
from pipelines.view.display import Display

NAMESPACE = "elastic"
LAST_LINES_S = 30.0


class Interrupts:
    """The first signal asks for a stop at the next boundary, the second ends at once."""

    def __init__(self) -> None:
        self.number = 0
        self.told = False
        self.listen()

    def listen(self) -> None:
        """Take the signals; once more after `ray.init`, which takes SIGTERM for itself."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number


def drive(asked: Asked, console: Console) -> int:
    """Run what is asked for; return the exit code. Raises `UserError`."""
    _refuse_passing_folder(asked)
    plan = make_plan(asked, torch.cuda.device_count())
    interrupts = Interrupts()
    console.print(
        f"run {plan.folder.name}: {plan.folder.url}  ·  MLflow: {plan.tracking_uri}",
        soft_wrap=True,
        highlight=False,
    )
    for note in plan.notes:
        console.print(note, soft_wrap=True, highlight=False)
    started = open_cluster(plan.num_workers, plan.use_gpus)
    if started and asked.detach:
        close_cluster(plan.folder.name, keep_actors=False)
        raise UserError(
            "--detach needs a cluster that outlives this command: `ray start --head` first, or "
            "set RAY_ADDRESS"
        )
    interrupts.listen()
    keep_actors = asked.detach
    try:
        run = equipped(plan)
        store_recipe(plan)
        return _follow(replace(plan, run=run), console, interrupts, asked.detach)
    except RunRefused as error:
        keep_actors = keep_actors or isinstance(error, RunTaken)  # they are somebody else's
        raise UserError(str(error)) from None
    except ControllerLost as error:
        print(
            f"elastic: the controller died ({error}); the same command resumes the run",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 128 + interrupts.number
    finally:
        close_cluster(plan.folder.name, keep_actors)


def _refuse_passing_folder(asked: Asked) -> None:
    """A submitted job's own folder ends with it. Raises `UserError`."""
    folder = job_folder()
    if folder is None:
        return
    storage = named_storage(asked.storage)
    if isinstance(storage, DiskStorage) and storage.path.is_relative_to(folder):
        raise UserError(
            f"--storage {asked.storage}: it lies in the job's working folder, which Ray deletes "
            "with the job; name a folder that every machine sees, or a URL, e.g. s3://bucket/runs"
        )
    if not isinstance(storage, DiskStorage) and not asked.tracking_uri:
        raise UserError(
            "--tracking-uri: without it MLflow's store would be a file in the job's working "
            "folder, which Ray deletes with the job; name a server"
        )


def open_cluster(num_workers: int, use_gpus: bool) -> bool:
    """Join the cluster of `RAY_ADDRESS`, or the one at hand, or start one; True if started.

    Raises `UserError`.
    """
    address = os.environ.get("RAY_ADDRESS")
    try:
        return join_or_start_cluster(address, num_workers, use_gpus, NAMESPACE)
    except (OSError, ValueError) as error:
        raise UserError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); unset it to start a "
            "local one"
        ) from None


def equipped(plan: Plan) -> Run:
    """The run with what its workers ask the cluster for that was joined. Raises `UserError`."""
    try:
        return replace(plan.run, resources=choose_resources(plan.settings.accelerator))
    except NoSuchAccelerator as error:
        raise UserError(str(error)) from None


def _follow(plan: Plan, console: Console, interrupts: Interrupts, detach: bool) -> int:
    started = time.time()
    drive_ = Drive(plan.run)
    if detach:
        return 0
    follower = Follower(plan.folder)
    with Display(console, plan.folder.name, since=started) as display:

        def show(progress: Progress) -> None:
            if interrupts.number and not interrupts.told:
                interrupts.told = True
                name = signal.Signals(interrupts.number).name
                drive_.request_stop(f"{name} at the driver")
            trouble = progress.trouble or follower.trouble
            display.update(time.time(), *follower.take(), trouble=trouble)

        progress = drive_.follow(show)
        follower.finish(LAST_LINES_S)
        show(progress)
    console.print(display.summary(time.time()), highlight=False, soft_wrap=True)
    _tell_ending(progress)
    assert progress.outcome is not None
    return exit_code(progress.outcome, interrupts.number)


def _tell_ending(progress: Progress) -> None:
    """What went wrong goes to standard error, the user's own traceback first."""
    outcome = progress.outcome
    assert outcome is not None
    if outcome.traceback:
        print(outcome.traceback, file=sys.stderr)
    if outcome.outcome != "completed":
        print(f"elastic: {outcome.outcome}: {outcome.reason}", file=sys.stderr)
    for line in progress.undelivered:
        print(f"elastic: {line}", file=sys.stderr)
