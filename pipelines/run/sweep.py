"""`elastic sweep`: trains a few steps under each of several layouts and tabulates the results."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console

from actors.controller.run import RunSpec
from actors.ray_backend.actor_names import end_actors
from actors.ray_backend.cluster.connection import will_be_private
from actors.ray_backend.driver import Drive, close_cluster
from actors.storage.checkpoint_files import FOLDER as CHECKPOINTS
from actors.storage.errors import ControllerLost
from actors.storage.storage import is_remote
from elastic.geometry.errors import ElasticError
from elastic.geometry.layout import Layout
from pipelines.errors import LayoutRefused, UserError
from pipelines.observe.history.formatting import counted
from pipelines.observe.history.progress import unit_of
from pipelines.observe.history.run_folder import RunFolder, Tail, default_tracking_uri
from pipelines.observe.view.sweep_table import Row, measure, refused, show, write
from pipelines.run.drive import Interrupts, open_cluster, with_worker_resources
from pipelines.run.plan import RunPlan, TrainRequest, make_plan, store_recipe
from pipelines.run.preflight import refuse_unstartable
from pipelines.run.recipes import name_of

EXPERIMENT = "sweep"
NUM_STEPS = 10
"""Steps per layout if the request names no number."""
UNDISTURBED = ("eval_every=0", "checkpoint.every=0", "snapshot.every=0")
"""Periodic work that would disturb the timing of some steps; `--set` may turn it on."""
TRACKING_PATIENCE_S = 30.0
MAX_START_TIMEOUT_S = 1e9


@dataclass(frozen=True)
class SweepRequest:
    """A request to train the same under each of several layouts."""

    train: TrainRequest
    """What to train; each trial replaces the run name, the workers and the layout."""
    layouts: str
    start_timeout_s: float = 600.0
    """How long a layout waits for its workers: a cluster may have to start machines."""

    @property
    def steps(self) -> int:
        return NUM_STEPS if self.train.steps is None else self.train.steps


@dataclass
class Trial:
    """One layout with its plan, or with its result row if the layout is infeasible."""

    layout: Layout
    plan: RunPlan | None
    row: Row | None = None

    @property
    def workers(self) -> str:
        return counted(self.layout.num_workers, "worker")


def sweep(request: SweepRequest, console: Console) -> int:
    """Train under each layout in turn, show and write the table; return the exit code.

    0 if any layout ran. Raises `UserError`.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path(request.train.storage) / "sweeps" / stamp
    num_gpus = torch.cuda.device_count()
    trials = trials_of(request, folder, num_gpus)
    console.print(f"sweep {stamp}: {folder}", soft_wrap=True, highlight=False)
    interrupts = Interrupts()
    try:
        _train_all(trials, stamp, num_gpus, request.start_timeout_s, console, interrupts)
        rows = [trial.row for trial in trials if trial.row is not None]
        folder.mkdir(parents=True, exist_ok=True)
        files = write(folder, rows)
        title = f"{name_of(request.train.recipe)}, {request.steps} steps per layout"
        show(console, title, rows, _unit(trials))
        console.print(f"table: {files[0]}, {files[1]}", soft_wrap=True, highlight=False)
        _track(trials, console, interrupts)
    except KeyboardInterrupt:
        return 128 + interrupts.number
    if interrupts.number:
        return 128 + interrupts.number
    return 0 if any(row.verdict == "ran" for row in rows) else 1


def trials_of(request: SweepRequest, folder: Path, num_gpus: int) -> list[Trial]:
    """The trials of all layouts, checked before anything is started. Raises `UserError`."""
    if request.steps < 2:
        raise UserError(f"--steps {request.steps}: use 2 or more, as the first is not measured")
    if not 0.0 < request.start_timeout_s <= MAX_START_TIMEOUT_S:
        raise UserError(f"--start-timeout {request.start_timeout_s:g}: give seconds, e.g. 600")
    layouts = parse_layouts(request.layouts)
    storage = request.train.storage
    if is_remote(storage):
        raise UserError(f"--storage {storage}: a sweep needs a local folder; name one")
    trials = [_trial(request, folder, layout, num_gpus) for layout in layouts]
    for trial in trials:
        if trial.plan is not None:
            refuse_unstartable(trial.plan)
    return trials


def parse_layouts(text: str) -> list[Layout]:
    """Read `tp=1; dp=2,tp=2`. Raises `UserError`."""
    layouts: list[Layout] = []
    for part in text.split(";"):
        try:
            layout = Layout.parse(part)
        except ElasticError as error:
            hint = "separate layouts by semicolons, e.g. 'tp=1; dp=2,tp=2'"
            raise UserError(f"--layouts {text!r}: {error}; {hint}") from None
        if layout in layouts:
            raise UserError(f"--layouts {text!r}: {layout} is listed twice; list it once")
        layouts.append(layout)
    return layouts


def _unit(trials: list[Trial]) -> str:
    """What the table counts: tokens or samples."""
    return next((unit_of(trial.plan.recipe) for trial in trials if trial.plan), "tokens")


def _trial(request: SweepRequest, folder: Path, layout: Layout, num_gpus: int) -> Trial:
    """Plan one layout. An infeasible layout becomes a row; any other problem is a `UserError`."""
    storage = request.train.storage
    run = replace(
        request.train,
        run_name=str(layout).replace("=", "").replace(",", "-"),
        storage=str(folder),
        workers=f"{layout.num_workers}:{layout.num_workers}",
        layout=str(layout),
        steps=request.steps,
        changes=(*UNDISTURBED, *request.train.changes),
        tracking_uri=default_tracking_uri(storage),
        experiment=EXPERIMENT,
        data_cache=str(Path(storage) / "data"),
    )
    try:
        return Trial(layout, make_plan(run, num_gpus, not will_be_private()))
    except LayoutRefused as error:
        return Trial(layout, None, refused(layout, str(error).removeprefix("--layout: ")))


def _train_all(
    trials: list[Trial],
    stamp: str,
    num_gpus: int,
    start_timeout_s: float,
    console: Console,
    interrupts: Interrupts,
) -> None:
    """Train under one layout after the other, until the first signal."""
    planned = [(trial, trial.plan) for trial in trials if trial.plan is not None]
    if not planned:
        return
    most = max(trial.layout.num_workers for trial, _ in planned)
    use_gpus = any(plan.use_gpus for _, plan in planned)
    started = open_cluster(min(most, num_gpus) if use_gpus else most, use_gpus)
    interrupts.install()
    try:
        for trial, plan in planned:
            if started and use_gpus and num_gpus < trial.layout.num_workers:
                needed = counted(trial.layout.num_workers, "GPU")
                reason = f"needs {needed}, but this machine has {num_gpus}"
                trial.row = refused(trial.layout, reason)
            elif not interrupts.number:
                console.print(f"{trial.layout}: {trial.workers}", highlight=False)
                patience = Patience(trial, plan.folder, start_timeout_s)
                _train(trial, plan, f"sweep-{stamp}-{plan.folder.name}", patience, interrupts)
    finally:
        close_cluster(f"sweep-{stamp}", keep_actors=False)


def _train(
    trial: Trial, plan: RunPlan, name: str, patience: Patience, interrupts: Interrupts
) -> None:
    """Train under one layout; its checkpoint is removed, and it is tracked after the sweep."""
    try:
        with _ended(name):
            store_recipe(plan)
            run = replace(with_worker_resources(plan), name=name, observers=())
            broken = _follow(run, interrupts, patience)
    except ControllerLost as error:
        broken = f"the controller died ({error})"
    if patience.refusal:
        trial.row = refused(trial.layout, patience.refusal)
    else:
        trial.row = measure(trial.layout, plan.folder, broken)
    plan.folder.files.remove(CHECKPOINTS)


class Patience:
    """The start timeout of a trial: time until its first generation forms."""

    def __init__(self, trial: Trial, folder: RunFolder, timeout_s: float) -> None:
        self._trial = trial
        self._timeout_s = timeout_s
        self._since = time.monotonic()
        self._journal = Tail(folder.journal)
        self._num_ready = 0
        self._has_begun = False
        self.refusal = ""

    def is_over(self) -> bool:
        """True once, when the timeout has passed; then `refusal` says what was missing."""
        for line in self._journal.drain():
            self._num_ready += line.get("event") == "WorkerReady"
            self._has_begun |= line.get("command") == "Form"
        waited_s = time.monotonic() - self._since
        if self._has_begun or self.refusal or waited_s < self._timeout_s:
            return False
        self.refusal = (
            f"only {self._num_ready} of {self._trial.workers} were ready within "
            f"{self._timeout_s:g} s; add machines, or raise --start-timeout"
        )
        return True


@contextmanager
def _ended(name: str) -> Iterator[None]:
    """End all actors of the run when the block ends (invariant 12)."""
    try:
        yield
    finally:
        end_actors(name)


def _follow(run: RunSpec, interrupts: Interrupts, patience: Patience) -> str:
    """Train to the end; return the reason of the end."""
    drive = Drive(run)

    def look() -> None:
        interrupts.forward(drive)
        if not interrupts.number and patience.is_over():
            drive.request_stop(patience.refusal)

    outcome = drive.follow(lambda progress: look()).outcome
    return outcome.reason if outcome else ""


def _track(trials: list[Trial], console: Console, interrupts: Interrupts) -> None:
    """Deliver the runs to MLflow, after all measurements."""
    lines = []
    for trial in trials:
        plan = trial.plan
        if plan is None or interrupts.number or not plan.folder.journal.exists():
            continue
        for observer in plan.run.observers:
            shortfall = observer.make().finish(TRACKING_PATIENCE_S)
            lines.append(shortfall or f"{plan.folder.name} is in MLflow, experiment {EXPERIMENT}")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
