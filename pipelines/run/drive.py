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
from typing import Any, NoReturn

import torch
from rich.console import Console

from actors.controller.run import RunSpec
from actors.controller.run_opening import repair_command
from actors.ray_backend.actor_names import NAMESPACE
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
from pipelines.observe.history.follow import Follower
from pipelines.observe.history.run_folder import named_storage
from pipelines.observe.view.display import Display
from pipelines.run.plan import RunPlan, TrainRequest, make_plan, store_recipe
from pipelines.run.preflight import refuse_unstartable
from pipelines.settings import TrainSettings
from pipelines.settings.errors import UserError

LAST_LINES_S = 30.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PRIVATE_HEAD_PATIENCE_S = 2.0
REPEAT_S = 1.0
"""`timeout` sends its signal to the process and to its group: that is one request, not two."""


class Interrupts:
    """The first signal asks for a stop at the next boundary, another one later ends at once."""

    def __init__(self) -> None:
        self.number = 0
        self._is_told = False
        self._first_at = 0.0
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        is_main = threading.current_thread() is threading.main_thread()  # others may not
        self._before = {number: signal.getsignal(number) for number in SIGNALS if is_main}
        if self._before.get(signal.SIGHUP) is signal.SIG_IGN:
            del self._before[signal.SIGHUP]  # started by `nohup`
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
            if time.monotonic() - self._first_at > REPEAT_S:
                raise KeyboardInterrupt
            return
        self.number, self._first_at = number, time.monotonic()
        if number == signal.SIGHUP:
            self._leave_terminal()

    def _leave_terminal(self) -> None:
        """The terminal is gone, and writing to it raises."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in self._terminals:
            os.dup2(nowhere, fd)
        os.close(nowhere)


def drive(request: TrainRequest, console: Console) -> int:
    """Run what is asked for; return the exit code. Raises `UserError`."""
    plan = plan_here(request)
    interrupts = Interrupts()
    tell_place(plan, console)
    for note in plan.notes:
        console.print(note, soft_wrap=True, highlight=False)
    has_begun = False
    try:
        with under_way(plan, request.detach, interrupts.listen) as drive_:
            has_begun = True
            if request.detach:
                return 0
            progress = follow(plan, drive_, console, lambda: interrupts.pass_on(drive_))
            _tell_ending(progress, plan)
        assert progress.outcome is not None
        if progress.is_head_gone:
            _exit_without_ray(progress.outcome, interrupts.number)
        return exit_code(progress.outcome, interrupts.number)
    except ControllerLost as error:
        if has_begun:
            told = f"the controller died ({error}); the same command resumes the run"
        else:
            check = repair_command(plan.folder.files).removesuffix(" --repair")
            told = f"the controller did not start ({error}); `{check}` checks the files of the run"
        print(f"elastic: {told}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + (interrupts.number or signal.SIGINT)


def _exit_without_ray(outcome: Stopped, signal_number: int) -> NoReturn:
    """End this process now: Ray's exit handlers would wait for its GCS, which is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    is_failure = outcome.outcome == "interrupted" and not signal_number
    os._exit(1 if is_failure else exit_code(outcome, signal_number))


def plan_here(request: TrainRequest) -> RunPlan:
    """The plan of a run that this machine is to drive. Raises `UserError`."""
    _refuse_passing_folder(request)
    plan = make_plan(request, torch.cuda.device_count())
    refuse_unstartable(plan, request.detach)
    return plan


def tell_place(plan: RunPlan, console: Console) -> None:
    """Where the run and its tracking are."""
    console.print(
        f"run {plan.folder.name}: {plan.folder.url}  ·  MLflow: {plan.tracking_uri}",
        soft_wrap=True,
        highlight=False,
    )


@contextmanager
def under_way(
    plan: RunPlan, detach: bool = False, joined: Callable[[], object] = lambda: None
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
        if not started and (note := warn_unsaved(plan.settings)):
            print(f"elastic: {note}", file=sys.stderr)
        run = equipped(plan)
        if is_private():  # nobody restarts the GCS of a private cluster
            run = replace(run, head_patience_s=PRIVATE_HEAD_PATIENCE_S)
        yield _begin(plan, run)
    except RunRefused as error:
        keep_actors = keep_actors or isinstance(error, RunTaken)  # they are somebody else's
        raise UserError(str(error)) from None
    finally:
        close_cluster(plan.folder.name, keep_actors)


def _begin(plan: RunPlan, run: RunSpec) -> Drive:
    """Start the run; `recipe.json` is not overwritten if another process drives it.

    The controller claims the run in a process of its own, so the recipe is stored before only if
    nobody is known to drive the run, and otherwise once the controller has the run.
    """
    try:
        is_driven = owner_of(plan.folder.files) is not None
    except OSError as error:
        where = plan.folder.storage
        raise UserError(f"--storage {where}: cannot be read ({error})") from None
    if not is_driven:
        store_recipe(plan)
    drive_ = Drive(run)
    if is_driven:  # by a process that has ended since
        store_recipe(plan)
    return drive_


def warn_unsaved(settings: TrainSettings) -> str:
    """What to say on a cluster about a run without checkpoints; empty for any other."""
    if settings.checkpoint_every != 0:
        return ""
    return (
        "checkpoint_every=0: only the last step is saved, so the loss of this cluster loses all "
        "progress; set checkpoint_every=auto"
    )


def _refuse_passing_folder(request: TrainRequest) -> None:
    """A submitted job's own folder ends with it. Raises `UserError`."""
    folder = job_folder()
    if folder is None:
        return
    storage = named_storage(request.storage)
    if isinstance(storage, DiskStorage) and storage.path.is_relative_to(folder):
        raise UserError(
            f"--storage {request.storage}: it lies in the job's working folder, which Ray deletes "
            "with the job; name a folder that every machine sees, or a URL, e.g. s3://bucket/runs"
        )
    if not isinstance(storage, DiskStorage) and not request.tracking_uri:
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
    except RunRefused as error:
        raise UserError(str(error)) from None
    except ClusterNotStarted as error:
        raise UserError(
            f"a local Ray cluster cannot be started ({error}): check memory, /dev/shm and the disk "
            "of Ray's folder, or name a running cluster in RAY_ADDRESS"
        ) from None
    except ClusterNotJoined as error:
        source = f"RAY_ADDRESS={address}" if address else "the cluster recorded by `ray start`"
        raise UserError(
            f"{source}: this Ray cluster cannot be joined ({error}); use its versions of Ray and "
            "Python and its token, or set RAY_ADDRESS=local to start a local one"
        ) from None
    except OSError as error:
        raise UserError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); unset it to start a "
            "local one"
        ) from None


def equipped(plan: RunPlan) -> RunSpec:
    """The run with what its workers ask the cluster for that was joined. Raises `UserError`."""
    try:
        resources = choose_resources(plan.settings.accelerator)
    except NoSuchAccelerator as error:
        raise UserError(str(error)) from None
    return replace(plan.run, resources={**resources, **plan.per_worker})


def follow(
    plan: RunPlan, drive_: Drive, console: Console | None, each: Callable[[], object]
) -> DriverReport:
    """Follow the run to its end, shown on the console if there is one; `each` is called twice a
    second. Raises `ControllerLost`."""
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
        return drive_.follow(lambda progress: each())
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
    """Which checkpoint there is, in words."""
    try:
        steps = [saved.step for saved in find_checkpoints(plan.folder.files).whole]
    except OSError as error:
        return f"whether the run is saved is not known ({error})"
    return f"the run is saved at step {max(steps)}" if steps else "no checkpoint is saved"


def _tell_ending(progress: DriverReport, plan: RunPlan) -> None:
    """What went wrong goes to standard error, the user's own traceback first."""
    outcome = progress.outcome
    assert outcome is not None
    if outcome.traceback:
        print(outcome.traceback, file=sys.stderr)
    if progress.is_head_gone and outcome.outcome == "interrupted":
        saved = f"{_saved(plan)} in {plan.folder.url}: the same command resumes it"
        print(f"elastic: {outcome.reason}; {saved}", file=sys.stderr)
    elif outcome.outcome != "completed":
        print(f"elastic: {outcome.outcome}: {outcome.reason}", file=sys.stderr)
    for line in progress.undelivered:
        print(f"elastic: {line}", file=sys.stderr)
