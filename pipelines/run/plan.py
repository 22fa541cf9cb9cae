"""The plan of a run: checks a request and turns it into the controller's run specification."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from actors.controller.run import RunSpec
from actors.runtime.code_digest import digest_of_sources
from actors.runtime.factory import Factory
from actors.snapshots.memory_layout import most_bytes
from actors.storage.storage import is_remote
from elastic.geometry.errors import Infeasible
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Capacity, Job
from elastic.planner.layout_choice import plan_layout
from elastic.protocol.events import RunOpened
from elastic.protocol.policy import Policy
from pipelines.callbacks.callback_thread import NamedCallback
from pipelines.callbacks.loading import CallbackLike, load_callbacks
from pipelines.data.cache.shared_indexes import INDEX_FOLDER, INDEXES
from pipelines.data.opening import RANDOM, prepared_folder
from pipelines.data.packing import prepare_chats
from pipelines.errors import LayoutRefused, UserError
from pipelines.hugging_face.recipe import with_model_of_folder
from pipelines.hugging_face.weights.pretrained import open_pretrained
from pipelines.loop.script import Script
from pipelines.observe.history.run_folder import (
    RECIPE,
    RECIPE_FORMAT,
    RunFolder,
    damaged_file,
    default_tracking_uri,
    named_storage,
    refuse_other_format,
)
from pipelines.observe.sidecar.notify import check_url
from pipelines.run.custom_plan import (
    STATE_DIGEST,
    changed_source,
    identity,
    notes_on,
    refuse_brought,
    refuse_unfit_recipe,
)
from pipelines.run.fault_sentences import parse_faults
from pipelines.run.job import job_of
from pipelines.run.options import policy_of, worker_options
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import RecipeLike, load, name_of
from pipelines.run.refusals import (
    check_tracking_uri,
    parse_layout,
    parse_workers,
    refuse_unreadable,
    refuse_unusable,
    unwritable,
)
from pipelines.settings import TrainSettings
from pipelines.settings.home import expand_home
from pipelines.settings.overrides import Given, differing_training_settings, first_problem, override
from pipelines.settings.recipe import Recipe
from pipelines.settings.script_file import refuse_in_file, shipped
from pipelines.settings.user_code import prints_dropped, user_code_errors

STREAM = "stream"
"""The folder of a run for the positions of streams and the indexes of data."""


@dataclass(frozen=True)
class TrainRequest:
    """A request to train: the command line of `elastic train`, or the arguments of the API."""

    recipe: RecipeLike
    run_name: str | None = None
    storage: str = "runs"
    workers: str | None = None
    layout: str | None = None
    steps: int | None = None
    audit_every: int | None = None
    data: str | None = None
    changes: tuple[str, ...] = ()
    inject: tuple[str, ...] = ()
    record_samples: bool = False
    tracking_uri: str | None = None
    experiment: str = "elastic"
    interface: str | None = None
    ports: str | None = None
    notify: str | None = field(default=None, repr=False)
    detach: bool = False
    profile: str | None = None
    data_cache: str | None = None
    """Folder of the prepared data; by default in the storage."""
    per_worker: Mapping[str, Any] = field(default_factory=dict)
    """Ray options of a worker's actor, besides its accelerator."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the recipe's function, by name."""
    callbacks: tuple[CallbackLike, ...] = ()
    tries_script: bool = True
    """Whether to run the body of a custom training loop once before the run."""

    def refuse_unreadable(self) -> None:
        """Raises `UserError` for options that are empty or not valid text; `--data` may be
        empty."""
        options = {f"--{key.replace('_', '-')}": value for key, value in vars(self).items()}
        names = tuple(given for given in self.callbacks if isinstance(given, str))
        data = {"--data": self.data or None, "--recipe": None, "--set": self.changes}
        refuse_unreadable({**options, **data, "--callbacks": None, "--callback": names})


@dataclass(frozen=True)
class RunPlan:
    """A checked run, ready to start."""

    run: RunSpec
    folder: RunFolder
    settings: TrainSettings
    num_workers: int
    use_gpus: bool
    tracking_uri: str
    recipe: dict[str, Any]
    per_worker: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Notes for the user, e.g. that the recipe's file has changed."""
    callbacks: tuple[NamedCallback, ...] = ()


def make_plan(request: TrainRequest, num_gpus: int, on_cluster: bool = False) -> RunPlan:
    """Check a request before anything is started or written, and make its plan.

    `on_cluster`: machines of a cluster may train, whose devices are not known here, so a script is
    not tried out. Raises `UserError` with a message of one line.
    """
    request.refuse_unreadable()
    settings, custom = settings_of(request)
    callbacks = load_callbacks(request.callbacks)
    notify_url = check_url(request.notify) if request.notify else None
    num_gpus = 0 if settings.accelerator == "cpu" else num_gpus
    folder = _run_folder(request)
    policy = _policy(request.workers, num_gpus, settings, folder.name)
    target_layout = _target_layout(request.layout, policy)
    faults, draining_workers = parse_faults(request.inject)
    settings = _with_places(settings, request, folder)
    tracking_uri = _tracking_uri(request)
    options = worker_options(folder.url, settings, faults, request.profile)
    refuse_unusable(folder)
    data_cache = request.data_cache or named_storage(request.storage).at("data").url
    factory = _program(settings, custom, data_cache, folder.files.at(STREAM).url)
    named = user_code_errors(f"recipe {name_of(request.recipe)}")
    with named if custom is not None else nullcontext(), prints_dropped():
        program = TrainingProgram(**{**factory.kwargs, "device": "cpu"})
        notes: tuple[str, ...] = ()
        if custom is not None:
            knows_device = settings.accelerator == "cpu" or not (num_gpus or on_cluster)
            notes = refuse_unfit_recipe(program, request.tries_script and knows_device)
        on_gpus = num_gpus or settings.accelerator not in ("auto", "cpu")
        job = job_of(settings, program, [target_layout.tp] if on_gpus else (), on_gpu=True)
        _refuse_impossible_layout(policy, target_layout, job)
        recipe = _recipe(request, policy, factory, program)
        recipe |= identity(custom, program) if custom is not None else {}
    notes += _refuse_other_training_settings(folder, recipe, settings)
    notes += notes_on(program) if custom is not None else ()
    run = RunSpec(
        name=folder.name,
        folder=folder.url,
        opening=RunOpened(0, policy, target_layout, job),
        program=replace(factory, kwargs=shipped(factory.kwargs, request.recipe, request.arguments)),
        options=replace(options, max_snapshot_bytes=most_bytes(program.specs())),
        draining_workers=draining_workers,
        observers=(_sidecar(folder, request, tracking_uri, notify_url, settings),),
        driver_timeout_s=settings.failure.driver_timeout_s,
        orphan_timeout_s=settings.failure.orphan_timeout_s,
        detached=request.detach,
        sources=digest_of_sources(),
    )
    return RunPlan(
        run,
        folder,
        settings,
        policy.max_workers,
        bool(num_gpus),
        tracking_uri,
        recipe,
        request.per_worker,
        notes,
        callbacks,
    )


def _tracking_uri(request: TrainRequest) -> str:
    if request.tracking_uri is not None:
        return check_tracking_uri(request.tracking_uri)
    return default_tracking_uri(request.storage)


def _with_places(
    settings: TrainSettings, request: TrainRequest, folder: RunFolder
) -> TrainSettings:
    """The settings with full paths for files outside the run's folder."""
    if request.record_samples:
        settings = settings.model_copy(update={"record_samples": _samples_file(folder)})
    if settings.init_from is not None:
        if not is_remote(settings.init_from):
            init_from = str(expand_home(settings.init_from.removeprefix("file://")).resolve())
            settings = settings.model_copy(update={"init_from": init_from})
        open_pretrained(settings)  # raises here, before data are prepared
    return settings


def _samples_file(folder: RunFolder) -> Path:
    if folder.path is None:
        raise UserError(
            f"--record-samples: workers append to one file, which {folder.storage} does not "
            "support; use a folder as --storage"
        )
    return folder.path / "samples.jsonl"


def _program(
    settings: TrainSettings, custom: Recipe | Script | None, data_cache: str, positions: str
) -> Factory:
    """The factory of the workers' program; prepares the data if necessary."""
    kwargs: dict[str, Any] = {"settings": settings.model_dump(mode="json"), "data_folder": None}
    if custom is not None:
        kwargs |= {"recipe": custom, "positions": positions}
    else:
        data = settings.data
        options: dict[str, Any] = {
            "tokenizer": data.tokenizer,
            "separator": data.separator,
            "held_out_fraction": data.held_out_fraction,
        }
        if data.format == "chat" and data.source != RANDOM:
            kwargs["data_folder"] = prepare_chats(data.source, data_cache, data.seq_len, **options)
        else:
            kwargs["data_folder"] = prepared_folder(data.source, data_cache, **options)
    if settings.accelerator == "cpu":
        kwargs["device"] = "cpu"  # also on a machine that has a GPU
    return Factory("pipelines.run.program:TrainingProgram", kwargs)


def _recipe(
    request: TrainRequest, policy: Policy, factory: Factory, program: TrainingProgram
) -> dict[str, Any]:
    """The content of `recipe.json`."""
    return {
        "format": RECIPE_FORMAT,
        "recipe": name_of(request.recipe),
        "arguments": {name: str(value) for name, value in request.arguments.items()},
        "steps": program.steps,
        "num_samples": program.workload.num_samples,
        "data_digest": program.workload.digest,
        "data_folder": factory.kwargs["data_folder"],
        "workers": f"{policy.min_workers}:{policy.max_workers}",
        "layout": request.layout,
        "settings": factory.kwargs["settings"],
    }


def _sidecar(
    folder: RunFolder,
    request: TrainRequest,
    tracking_uri: str,
    notify_url: str | None,
    settings: TrainSettings,
) -> Factory:
    kwargs = {
        "run_folder": folder.url,
        "tracking_uri": tracking_uri,
        "experiment": request.experiment,
        "notify_url": notify_url,
        "notify_after_s": settings.notify_after_s,
    }
    # MLflow's telemetry already reports the import.
    environment = {"MLFLOW_DISABLE_TELEMETRY": "true"}
    return Factory("pipelines.observe.sidecar.sidecar:sidecar", kwargs, environment)


def settings_of(request: TrainRequest) -> tuple[TrainSettings, Recipe | Script | None]:
    """The run's settings, and the recipe or script of a custom model. Raises `UserError`."""
    refuse_in_file("a run that is started")
    loaded = load(request.recipe, request.arguments)
    options = {
        "--data": ("data.source", request.data),
        "--steps": ("steps", request.steps),
        "--audit-every": ("audit.every", request.audit_every),
        "--interface": ("network.interface", request.interface),
        "--ports": ("network.ports", request.ports),
    }
    changes: list[str | Given] = list(request.changes)
    for option, (key, value) in options.items():
        if value is not None:
            changes.append(Given(key, str(value), option))
    if isinstance(loaded, TrainSettings):
        return with_model_of_folder(override(loaded, changes)), None
    refuse_brought(changes)
    return override(loaded.settings, changes), loaded


def _policy(workers: str | None, num_gpus: int, settings: TrainSettings, run_name: str) -> Policy:
    at_most = num_gpus or min(4, os.cpu_count() or 1)
    min_workers, max_workers = parse_workers(workers or str(at_most))
    return policy_of(settings, min_workers, max_workers, run_name)


def _target_layout(layout: str | None, policy: Policy) -> TargetLayout:
    target_layout = parse_layout(layout or "", policy.max_workers)
    num_requested = target_layout.num_model_ranks * prod(target_layout.data_axes or (1,))
    if num_requested > policy.max_workers:
        raise UserError(
            f"--layout {layout} needs {num_requested} workers, but --workers allows "
            f"{policy.max_workers}: raise --workers or choose a smaller layout"
        )
    return target_layout


def _refuse_impossible_layout(policy: Policy, target_layout: TargetLayout, job: Job) -> None:
    """Raises `LayoutRefused` for a layout that is infeasible even with all workers."""
    capacity = Capacity(policy.max_workers)
    layout = plan_layout(None, capacity, target_layout, job, snapshots_cover=False)
    if isinstance(layout, Infeasible):
        raise LayoutRefused(f"--layout: {layout.reason}")


def _run_folder(request: TrainRequest) -> RunFolder:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    recipe = name_of(request.recipe).removesuffix(".py")
    last = (recipe.rpartition(":")[2] or recipe).rstrip("/").rpartition("/")[2]
    plain = re.sub(r"[^A-Za-z0-9]+", "-", last).strip("-") or "run"
    name = f"{plain}-{stamp}" if request.run_name is None else request.run_name
    return RunFolder.of(request.storage, name)


def _refuse_other_training_settings(
    folder: RunFolder, recipe: dict[str, Any], settings: TrainSettings
) -> tuple[str, ...]:
    """Raises `UserError` if the stored run of this name has other training settings; returns
    notes on possible differences."""
    try:
        stored = folder.recipe()
    except OSError as error:
        raise UserError(f"--storage {folder.storage}: cannot be read ({error})") from None
    if stored is None:
        return ()
    old = _stored_settings(folder, stored)
    differing = differing_training_settings(old, settings)
    if stored.get("data_digest") == recipe["data_digest"]:  # the same data may have moved
        differing = [change for change in differing if not change.startswith("data.source: ")]
    differing += [
        f"{key}: {stored.get(key)} -> {recipe.get(key)}"
        for key in ("num_samples", "data_digest", "arguments")
        if (stored.get(key) or {}) != (recipe.get(key) or {})
    ]
    if stored.get(STATE_DIGEST) != recipe.get(STATE_DIGEST):
        differing.append("the state has other names, shapes or dtypes")
    if differing:
        raise UserError(
            f"run '{folder.name}' in {folder.storage} has other training settings "
            f"({'; '.join(differing)}): resume it unchanged, or choose another --run-name"
        )
    return tuple(filter(None, [changed_source(stored, recipe)]))


def _stored_settings(folder: RunFolder, stored: dict[str, Any]) -> TrainSettings:
    """The settings in `recipe.json`. Raises `UserError` for another format or a damaged file."""
    refuse_other_format(folder, stored)
    try:
        return TrainSettings.model_validate(stored["settings"])
    except KeyError:
        raise damaged_file(folder.files, RECIPE) from None
    except ValidationError as error:
        problem = f"settings: {first_problem(error)}"
        raise damaged_file(folder.files, RECIPE, problem) from None


def store_recipe(plan: RunPlan) -> None:
    """Make the run's folder, write `recipe.json` and publish the indexes of the data.

    Raises `UserError`.
    """
    folder = plan.folder
    try:
        folder.files.write(RECIPE, json.dumps(plan.recipe, indent=1).encode())
    except OSError as error:
        raise unwritable(folder, error.strerror or str(error)) from None
    INDEXES.publish(f"{folder.files.at(STREAM).url}/{INDEX_FOLDER}")
