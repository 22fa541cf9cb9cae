"""Drive a run from this process: start it, show it, pass signals on, leave Ray as it was found."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from actors.accelerators import NoSuchAccelerator, choose_resources
from actors.errors import ControllerLost, RunRefused, RunTaken
from actors.launch import Drive, close_cluster, exit_code, join_or_start_cluster
from actors.ray_controller import Progress, Run
from actors.ray_names import NAMESPACE
from actors.ray_private import job_folder
from actors.storage import DiskStorage
from pipelines.errors import UserError
from pipelines.follow import Follower
from pipelines.plan import Asked, Plan, make_plan, store_recipe
from pipelines.run_folder import named_storage
from pipelines.view.display import Display

LAST_LINES_S = 30.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """The first signal asks for a stop at the next boundary, the second ends at once."""

    def __init__(self) -> None:
        self.number = 0
        self._is_told = False
        is_main = threading.current_thread() is threading.main_thread()  # others may not
        self._before = {number: signal.getsignal(number) for number in SIGNALS if is_main}
        self.listen()

    def listen(self) -> None:
        """Take the signals; once more after `ray.init`, which takes SIGTERM for itself."""
        for number in self._before:
            signal.signal(number, self._take)

    def give_back(self) -> None:
        """Whoever had the signals before has them again."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def pass_on(self, drive_: Drive) -> None:
        """Ask for the stop, once."""
        if self.number and not self._is_told:
            self._is_told = True
            drive_.request_stop(f"{signal.Signals(self.number).name} at the driver")

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number


def drive(asked: Asked, console: Console) -> int:
    """Run what is asked for; return the exit code. Raises `UserError`."""
    plan = plan_here(asked)
    interrupts = Interrupts()
    tell_place(plan, console)
    for note in plan.notes:
        console.print(note, soft_wrap=True, highlight=False)
    try:
        with under_way(plan, asked.detach, interrupts.listen) as drive_:
            if asked.detach:
                return 0
            progress = follow(plan, drive_, console, lambda: interrupts.pass_on(drive_))
        _tell_ending(progress)
        assert progress.outcome is not None
        return exit_code(progress.outcome, interrupts.number)
    except ControllerLost as error:
        print(
            f"elastic: the controller died ({error}); the same command resumes the run",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 128 + interrupts.number


def plan_here(asked: Asked) -> Plan:
    """The plan of a run that this machine is to drive. Raises `UserError`."""
    _refuse_passing_folder(asked)
    return make_plan(asked, torch.cuda.device_count())


def tell_place(plan: Plan, console: Console) -> None:
    """Where the run and its tracking are."""
    console.print(
        f"run {plan.folder.name}: {plan.folder.url}  ·  MLflow: {plan.tracking_uri}",
        soft_wrap=True,
        highlight=False,
    )


@contextmanager
def under_way(
    plan: Plan, detach: bool = False, joined: Callable[[], object] = lambda: None
) -> Iterator[Drive]:
    """The run, started, until the block ends; then nothing of it is left on the cluster, unless
    it is detached, and Ray is as it was before. `joined` is called once Ray is there.

    Raises `UserError` or `ControllerLost`.
    """
    started = open_cluster(plan.num_workers, plan.use_gpus, plan.per_worker)
    keep_actors = detach
    try:
        if started and detach:
            raise UserError(
                "--detach needs a cluster that outlives this command: `ray start --head` first, or "
                "set RAY_ADDRESS"
            )
        joined()
        run = equipped(plan)
        store_recipe(plan)
        yield Drive(run)
    except RunRefused as error:
        keep_actors = keep_actors or isinstance(error, RunTaken)  # they are somebody else's
        raise UserError(str(error)) from None
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


def open_cluster(
    num_workers: int, use_gpus: bool, per_worker: Mapping[str, Any] | None = None
) -> bool:
    """Join the cluster of `RAY_ADDRESS`, or the one at hand, or start one; True if started.

    Raises `UserError`.
    """
    address = os.environ.get("RAY_ADDRESS")
    try:
        return join_or_start_cluster(address, num_workers, use_gpus, NAMESPACE, per_worker)
    except (OSError, ValueError) as error:
        raise UserError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); unset it to start a "
            "local one"
        ) from None


def equipped(plan: Plan) -> Run:
    """The run with what its workers ask the cluster for that was joined. Raises `UserError`."""
    try:
        resources = choose_resources(plan.settings.accelerator)
    except NoSuchAccelerator as error:
        raise UserError(str(error)) from None
    return replace(plan.run, resources={**resources, **plan.per_worker})


def follow(
    plan: Plan, drive_: Drive, console: Console | None, each: Callable[[], object]
) -> Progress:
    """Follow the run to its end, shown on the console if there is one; `each` is called twice a
    second. Raises `ControllerLost`."""
    if console is None:
        return drive_.follow(lambda progress: each())
    follower = Follower(plan.folder)
    with Display(console, plan.folder.name, since=drive_.began) as display:

        def show(progress: Progress) -> None:
            each()
            trouble = progress.trouble or follower.trouble
            display.update(time.time(), *follower.take(), trouble=trouble)

        progress = drive_.follow(show)
        follower.finish(LAST_LINES_S)
        show(progress)
    console.print(display.summary(time.time()), highlight=False, soft_wrap=True)
    return progress


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
