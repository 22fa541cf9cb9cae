"""The driver of a run: starts it, displays it, forwards signals and leaves Ray as it was."""

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
from typing import Any, NoReturn, Protocol

import torch
from rich.console import Console

from actors.controller.run import RunSpec
from actors.controller.run_opening import repair_command
from actors.ray_backend.actor_names import NAMESPACE
from actors.ray_backend.cluster.connection import will_be_private
from actors.ray_backend.cluster.ray_private import job_folder
from actors.ray_backend.cluster.resources import NoSuchAccelerator, choose_resources
from actors.ray_backend.controller import DriverReport
from actors.ray_backend.driver import (
    Drive,
    close_cluster,
    exit_code,
    is_private,
    join_or_start_cluster,
    keep_logs,
)
from actors.storage.checkpoint_files import find_checkpoints
from actors.storage.errors import (
    ClusterNotJoined,
    ClusterNotStarted,
    ControllerLost,
    RunRefused,
    RunTaken,
)
from actors.storage.lease import owner_of
from actors.storage.storage import DiskStorage
from elastic.protocol.commands import Stopped
from pipelines.callbacks.callback_thread import CallbackThread, called_back
from pipelines.errors import UserError
from pipelines.observe.history.follow import Follower
from pipelines.observe.history.run_folder import RECIPE, named_storage
from pipelines.observe.view.display import Display
from pipelines.run.plan import RunPlan, TrainRequest, make_plan, store_recipe
from pipelines.run.preflight import refuse_unstartable
from pipelines.settings import TrainSettings
from pipelines.settings.user_code import short_traceback

LAST_LINES_S = 30.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PRIVATE_HEAD_PATIENCE_S = 2.0
REPEAT_S = 1.0
"""`timeout` signals the process and its group: signals this close together are one request."""


class Stoppable(Protocol):
    """A run that can be requested to stop at its next step boundary."""

    def request_stop(self, reason: str) -> object: ...


class Interrupts:
    """Signal handling: the first signal requests a stop at the next step boundary, a later one
    ends the process at once."""

    def __init__(self) -> None:
        self.number = 0
        self._has_requested_stop = False
        self._first_at = 0.0
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        # Only the main thread may install signal handlers.
        is_main = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.getsignal(number) for number in SIGNALS if is_main}
        if self._before.get(signal.SIGHUP) is signal.SIG_IGN:
            del self._before[signal.SIGHUP]  # started by `nohup`
        self.install()

    def install(self) -> None:
        """Install the handlers; call it again after `ray.init`, which takes SIGTERM for itself."""
        for number in self._before:
            signal.signal(number, self._take)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def forward(self, drive_: Stoppable) -> None:
        """Request the stop, once."""
        if self.number and not self._has_requested_stop:
            self._has_requested_stop = True
            drive_.request_stop(f"{signal.Signals(self.number).name} at the driver")

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            if time.monotonic() - self._first_at > REPEAT_S:
                raise KeyboardInterrupt
            return
        self.number, self._first_at = number, time.monotonic()
        if number == signal.SIGHUP:
            self._leave_terminal()

    def _leave_terminal(self) -> None:
        """Redirect output to the null device: writing to a closed terminal raises."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in self._terminals:
            os.dup2(nowhere, fd)
        os.close(nowhere)


def drive(request: TrainRequest, console: Console) -> int:
    """Train as requested; return the exit code. Raises `UserError`."""
    plan = plan_on_this_machine(request)
    interrupts = Interrupts()

    def joined() -> None:
        interrupts.install()
        print_location(plan, console)

    has_begun = False
    try:
        with called_back(plan.folder, plan.callbacks, plan.recipe) as calls:
            with started_run(plan, request.detach, joined) as drive_:
                has_begun = True
                if request.detach:
                    return 0
                calls.start()
                progress = follow(plan, drive_, console, lambda: interrupts.forward(drive_))
                _print_ending(progress, plan)
            calls.outcome = progress.outcome
        print_failures(calls)
        assert progress.outcome is not None
        if progress.is_head_gone:
            _exit_without_ray(progress.outcome, interrupts.number)
        return exit_code(progress.outcome, interrupts.number)
    except ControllerLost as error:
        if has_begun:
            problem = f"the controller died ({error}); repeat the command to resume the run"
        else:
            check = repair_command(plan.folder.files).removesuffix(" --repair")
            problem = (
                f"the controller did not start ({error}); check the run's files with `{check}`"
            )
        print(f"elastic: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + (interrupts.number or signal.SIGINT)


def print_failures(calls: CallbackThread) -> None:
    """Print again, at the end of a command, which callbacks have failed."""
    for line in calls.failures:
        print(f"elastic: {line}", file=sys.stderr)


def _exit_without_ray(outcome: Stopped, signal_number: int) -> NoReturn:
    """End this process now: Ray's exit handlers would wait for its lost GCS."""
    sys.stdout.flush()
    sys.stderr.flush()
    is_failure = outcome.outcome == "interrupted" and not signal_number
    os._exit(1 if is_failure else exit_code(outcome, signal_number))


def plan_on_this_machine(request: TrainRequest) -> RunPlan:
    """The plan of a run that this machine drives. Raises `UserError`."""
    _refuse_job_folder(request)
    plan = make_plan(request, torch.cuda.device_count(), not will_be_private())
    refuse_unstartable(plan, request.detach)
    return plan


def print_location(plan: RunPlan, console: Console) -> None:
    """Print where the run's files and its tracking store are, and the plan's notes."""
    place = f"run {plan.folder.name}: {plan.folder.url}  ·  MLflow: {plan.tracking_uri}"
    for line in (place, *plan.notes):
        console.print(line, soft_wrap=True, highlight=False)


@contextmanager
def started_run(
    plan: RunPlan, detach: bool = False, joined: Callable[[], object] = lambda: None
) -> Iterator[Drive]:
    """Start the run; at the end of the block, end its actors (unless detached) and leave Ray.

    `joined` is called once Ray is available. Raises `UserError` or `ControllerLost`.
    """
    started = open_cluster(plan.num_workers, plan.use_gpus, plan.per_worker)
    keep_actors = detach
    try:
        if started and detach:
            raise UserError(
                "--detach needs a cluster that outlives this command: run `ray start --head` "
                "first, or set RAY_ADDRESS"
            )
        joined()
        if not started and (note := warn_unsaved(plan.settings)):
            print(f"elastic: {note}", file=sys.stderr)
        run = with_worker_resources(plan)
        if is_private():  # the GCS of a private cluster is never restarted
            run = replace(run, head_patience_s=PRIVATE_HEAD_PATIENCE_S)
        yield _begin(plan, run)
    except RunRefused as error:
        keep_actors = keep_actors or isinstance(error, RunTaken)  # another driver's actors
        raise UserError(str(error)) from None
    finally:
        close_cluster(plan.folder.name, keep_actors)


def _begin(plan: RunPlan, run: RunSpec) -> Drive:
    """Start the run without overwriting the `recipe.json` of another driver.

    The controller claims the run in its own process. If the lease names a driver, the recipe is
    stored only after the controller has claimed the run, otherwise before.
    """
    try:
        is_driven = owner_of(plan.folder.files) is not None
    except OSError as error:
        where = plan.folder.storage
        raise UserError(f"--storage {where}: cannot be read ({error})") from None
    is_new = plan.folder.recipe() is None
    if not is_driven:
        store_recipe(plan)
    try:
        drive_ = Drive(run)
    except RunRefused as error:
        # Else a later run of this name would be refused for its other settings.
        if is_new and not isinstance(error, RunTaken):
            plan.folder.files.remove(RECIPE)
        raise
    if is_driven:  # the previous driver has ended since
        store_recipe(plan)
    return drive_


def warn_unsaved(settings: TrainSettings) -> str:
    """A warning for a run on a cluster without checkpoints; empty for any other run."""
    if settings.checkpoint.every != 0:
        return ""
    return (
        "checkpoint.every=0: only the last step is saved, so losing this cluster loses all "
        "progress; set checkpoint.every=auto"
    )


def _refuse_job_folder(request: TrainRequest) -> None:
    """Refuse to write into the working folder of a submitted Ray job, which Ray deletes with the
    job. Raises `UserError`."""
    folder = job_folder()
    if folder is None:
        return
    storage = named_storage(request.storage)
    if isinstance(storage, DiskStorage) and storage.path.is_relative_to(folder):
        raise UserError(
            f"--storage {request.storage} is in the job's working folder, which Ray deletes with "
            "the job; use a folder that every machine sees, or a URL, e.g. s3://bucket/runs"
        )
    if not isinstance(storage, DiskStorage) and not request.tracking_uri:
        raise UserError(
            "--tracking-uri is missing: MLflow's default store is a file in the job's working "
            "folder, which Ray deletes with the job; give the URL of an MLflow server"
        )


def open_cluster(
    num_workers: int, use_gpus: bool, per_worker: Mapping[str, Any] | None = None
) -> bool:
    """Join the cluster of `RAY_ADDRESS` or of `ray start`, or start a local one; True if started.

    Raises `UserError`.
    """
    address = os.environ.get("RAY_ADDRESS")
    try:
        return join_or_start_cluster(address, num_workers, use_gpus, NAMESPACE, per_worker)
    except RunRefused as error:
        raise UserError(str(error)) from None
    except ClusterNotStarted as error:
        raise UserError(
            f"a local Ray cluster cannot be started ({error}): check memory, /dev/shm and the disk "
            "of Ray's folder, or set RAY_ADDRESS to a running cluster"
        ) from None
    except ClusterNotJoined as error:
        source = f"RAY_ADDRESS={address}" if address else "the cluster recorded by `ray start`"
        raise UserError(
            f"{source}: this Ray cluster cannot be joined ({error}); use its versions of Ray and "
            "Python and its token, or set RAY_ADDRESS=local to start a local cluster"
        ) from None
    except OSError as error:
        raise UserError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); unset RAY_ADDRESS to "
            "start a local cluster"
        ) from None


def with_worker_resources(plan: RunPlan) -> RunSpec:
    """The run with its workers' resource requests for the joined cluster. Raises `UserError`."""
    try:
        resources = choose_resources(plan.settings.accelerator)
    except NoSuchAccelerator as error:
        raise UserError(str(error)) from None
    return replace(plan.run, resources={**resources, **plan.per_worker})


def follow(
    plan: RunPlan, drive_: Drive, console: Console | None, each: Callable[[], object]
) -> DriverReport:
    """Follow the run to its end and display it on the console if there is one; call `each` twice
    a second. Raises `ControllerLost`."""
    try:
        progress = _follow(plan, drive_, console, each)
    except ControllerLost:
        keep_logs()
        raise
    has_failed = progress.outcome is not None and progress.outcome.outcome == "failed"
    if has_failed or progress.is_head_gone:
        keep_logs()
    return progress


def _follow(
    plan: RunPlan, drive_: Drive, console: Console | None, each: Callable[[], object]
) -> DriverReport:
    if console is None:

        def ignore(progress: DriverReport) -> None:
            each()

        return drive_.follow(ignore)
    follower = Follower(plan.folder)
    began, history = drive_.began, follower.history
    with Display(console, plan.folder.name, began, history) as display:

        def show(progress: DriverReport) -> None:
            each()
            trouble = progress.trouble or follower.trouble
            display.update(time.time(), *follower.take(), trouble=trouble)

        progress = drive_.follow(show)
        follower.finish(LAST_LINES_S)
        show(progress)
    console.print(display.summary(time.time()), highlight=False, soft_wrap=True)
    return progress


def _saved(plan: RunPlan) -> str:
    """The newest checkpoint, in words."""
    try:
        steps = [saved.step for saved in find_checkpoints(plan.folder.files).whole]
    except OSError as error:
        return f"the checkpoints cannot be listed ({error})"
    return f"the run is saved at step {max(steps)}" if steps else "there is no checkpoint"


def _print_ending(progress: DriverReport, plan: RunPlan) -> None:
    """Print what went wrong to standard error, the traceback of the user's code first."""
    outcome = progress.outcome
    assert outcome is not None
    if outcome.traceback:
        print(short_traceback(outcome.traceback), file=sys.stderr)
    if progress.is_head_gone and outcome.outcome == "interrupted":
        saved = f"{_saved(plan)} in {plan.folder.url}: repeat the command to resume it"
        print(f"elastic: {outcome.reason}; {saved}", file=sys.stderr)
    elif outcome.outcome == "user_error":
        print(f"elastic: {outcome.reason}", file=sys.stderr)
    elif outcome.outcome != "completed":
        print(f"elastic: {outcome.outcome}: {outcome.reason}", file=sys.stderr)
    for line in progress.undelivered:
        print(f"elastic: {line}", file=sys.stderr)
