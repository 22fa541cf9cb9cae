"""From what the user asks for to what a controller is given; every refusal is one line."""

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

from actors.factory import Factory
from actors.ray_controller import Run
from actors.reach import refuse_unreachable
from actors.snapshot_memory import most_bytes
from actors.sources import digest_of_sources
from elastic.events import RunOpened
from elastic.infeasible import Infeasible
from elastic.planning import Capacity, Job, Wish, plan_layout
from elastic.policy import Policy
from pipelines.data import prepared_folder
from pipelines.data.opening import RANDOM
from pipelines.data.packing import prepare_chats
from pipelines.early_refusals import parse_layout
from pipelines.errors import LayoutRefused, UserError
from pipelines.home import expanded
from pipelines.hugging_face.pretrained import open_pretrained
from pipelines.hugging_face.recipe import with_model_of_folder
from pipelines.inject import parse_faults
from pipelines.job import job_of
from pipelines.loop.script import Script
from pipelines.notify import check_url
from pipelines.overrides import Given, differing_maths, first_problem, override
from pipelines.own_plan import (
    STATE_DIGEST,
    changed_source,
    identity,
    notes_on,
    refuse_brought,
    refuse_unfit_recipe,
)
from pipelines.policy import policy_of
from pipelines.program import TrainingProgram
from pipelines.recipe import Recipe
from pipelines.recipes import RecipeLike, load, name_of
from pipelines.refusals import check_tracking_uri, parse_workers, refuse_unreadable
from pipelines.run_folder import (
    RECIPE,
    RunFolder,
    damaged_file,
    default_tracking_uri,
    named_storage,
)
from pipelines.settings import TrainSettings
from pipelines.user_code import code_of_user
from pipelines.worker_options import worker_options

RECIPE_FORMAT = 1


@dataclass(frozen=True)
class Asked:
    """What is asked for: the command line of `elastic train`, or the arguments of an API."""

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
    """Where text is prepared; by default in the storage."""
    per_worker: Mapping[str, Any] = field(default_factory=dict)
    """What a worker's actor asks the cluster for beside its accelerator, as Ray's options."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the recipe's function, by name."""

    def refuse_unreadable(self) -> None:
        """Raises `UserError` for options that are empty, or no text; an empty `--data` is text."""
        options = {f"--{key.replace('_', '-')}": value for key, value in vars(self).items()}
        data = {"--data": self.data or None, "--recipe": None, "--set": self.changes}
        refuse_unreadable({**options, **data})


@dataclass(frozen=True)
class Plan:
    """A run that can be started, and what to tell about it."""

    run: Run
    folder: RunFolder
    settings: TrainSettings
    num_workers: int
    use_gpus: bool
    tracking_uri: str
    recipe: dict[str, Any]
    per_worker: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Lines for the user, of what is not as it was."""


def make_plan(asked: Asked, num_gpus: int) -> Plan:
    """Check everything that can be checked before anything is started or written.

    Raises `UserError`.
    """
    asked.refuse_unreadable()
    settings, own = settings_of(asked)
    notify_url = check_url(asked.notify) if asked.notify else None
    num_gpus = 0 if settings.accelerator == "cpu" else num_gpus
    folder = _run_folder(asked)
    policy = _policy(asked.workers, num_gpus, settings, folder.name)
    wish = _wish(asked.layout, policy)
    faults, leavers = parse_faults(asked.inject)
    settings = _with_places(settings, asked, folder)
    tracking_uri = _tracking_uri(asked)
    options = worker_options(folder.url, settings, policy, faults, asked.profile)
    _refuse_unusable(folder)
    factory = _program(
        settings, own, asked.data_cache or named_storage(asked.storage).at("data").url
    )
    with code_of_user(f"recipe {name_of(asked.recipe)}") if own is not None else nullcontext():
        program = TrainingProgram(**{**factory.kwargs, "device": "cpu"})
        if own is not None:
            refuse_unfit_recipe(program.workload, settings)
        job = job_of(settings, program)
        _refuse_impossible_layout(policy, wish, job)
        recipe = _recipe(asked, policy, factory, program)
        recipe |= identity(own, program) if own is not None else {}
    notes = _refuse_other_maths(folder, recipe, settings)
    notes += notes_on(program.workload, settings) if own is not None else ()
    run = Run(
        name=folder.name,
        folder=folder.url,
        opening=RunOpened(0, policy, wish, job),
        program=factory,
        options=replace(options, max_snapshot_bytes=most_bytes(program.specs())),
        leavers=leavers,
        observers=(
            _sidecar(folder, tracking_uri, asked.experiment, notify_url, settings.notify_after_s),
        ),
        driver_timeout_s=settings.driver_timeout_s,
        orphan_timeout_s=settings.orphan_timeout_s,
        detached=asked.detach,
        sources=digest_of_sources(),
    )
    return Plan(
        run,
        folder,
        settings,
        policy.max_workers,
        bool(num_gpus),
        tracking_uri,
        recipe,
        asked.per_worker,
        notes,
    )


def _tracking_uri(asked: Asked) -> str:
    if asked.tracking_uri is not None:
        return check_tracking_uri(asked.tracking_uri)
    return default_tracking_uri(asked.storage)


def _with_places(settings: TrainSettings, asked: Asked, folder: RunFolder) -> TrainSettings:
    """What is read or written beside the run's files, by its full path."""
    if asked.record_samples:
        settings = settings.model_copy(update={"record_samples": _samples_file(folder)})
    if settings.init_from is not None:
        there = str(expanded(settings.init_from).resolve())
        settings = settings.model_copy(update={"init_from": there})
        open_pretrained(settings)  # refused here, before data are prepared
    return settings


def _samples_file(folder: RunFolder) -> Path:
    if folder.path is None:
        raise UserError(
            f"--record-samples: workers append to one file, which {folder.storage} cannot; name a "
            "folder as --storage"
        )
    return folder.path / "samples.jsonl"


def _program(settings: TrainSettings, own: Recipe | Script | None, data_cache: str) -> Factory:
    """How workers make the program; its data are prepared if need be."""
    kwargs: dict[str, Any] = {"settings": settings.model_dump(mode="json"), "data_folder": None}
    if own is not None:
        kwargs["recipe"] = own
    else:
        data = settings.data
        options: dict[str, Any] = {
            "tokenizer": data.tokenizer,
            "separator": data.separator,
            "held_out_fraction": data.held_out_fraction,
        }
        if data.format == "chat" and data.source != RANDOM:
            folder = prepare_chats(data.source, data_cache, data.seq_len, **options)
        else:
            folder = prepared_folder(data.source, data_cache, **options)
        kwargs["data_folder"] = folder
    if settings.accelerator == "cpu":
        kwargs["device"] = "cpu"  # also on a machine that has a GPU
    return Factory("pipelines.program:TrainingProgram", kwargs)


def _recipe(
    asked: Asked, policy: Policy, factory: Factory, program: TrainingProgram
) -> dict[str, Any]:
    """What `recipe.json` says of the run."""
    return {
        "format": RECIPE_FORMAT,
        "recipe": name_of(asked.recipe),
        "arguments": {name: str(value) for name, value in asked.arguments.items()},
        "steps": program.steps,
        "num_samples": program.workload.num_samples,
        "data_digest": program.workload.digest,
        "data_folder": factory.kwargs["data_folder"],
        "workers": f"{policy.min_workers}:{policy.max_workers}",
        "layout": asked.layout,
        "settings": factory.kwargs["settings"],
    }


def _sidecar(
    folder: RunFolder,
    tracking_uri: str,
    experiment: str,
    notify_url: str | None,
    notify_after_s: float,
) -> Factory:
    kwargs = {
        "run_folder": folder.url,
        "tracking_uri": tracking_uri,
        "experiment": experiment,
        "notify_url": notify_url,
        "notify_after_s": notify_after_s,
    }
    # Importing MLflow is already an event that its telemetry would report.
    environment = {"MLFLOW_DISABLE_TELEMETRY": "true"}
    return Factory("pipelines.sidecar:sidecar", kwargs, environment)


def settings_of(asked: Asked) -> tuple[TrainSettings, Recipe | Script | None]:
    """Those of the run, and the recipe if it has a model of its own. Raises `UserError`."""
    found = load(asked.recipe, asked.arguments)
    options = {
        "--data": ("data.source", asked.data),
        "--steps": ("steps", asked.steps),
        "--audit-every": ("audit_every", asked.audit_every),
        "--interface": ("network.interface", asked.interface),
        "--ports": ("network.ports", asked.ports),
    }
    changes: list[str | Given] = list(asked.changes)
    for option, (key, value) in options.items():
        if value is not None:
            changes.append(Given(key, str(value), option))
    if isinstance(found, TrainSettings):
        return with_model_of_folder(override(found, changes)), None
    refuse_brought(changes)
    return override(found.settings, changes), found


def _policy(workers: str | None, num_gpus: int, settings: TrainSettings, run_name: str) -> Policy:
    at_most = num_gpus or min(4, os.cpu_count() or 1)
    min_workers, max_workers = parse_workers(workers or str(at_most))
    return policy_of(settings, min_workers, max_workers, run_name)


def _wish(layout: str | None, policy: Policy) -> Wish:
    wish = parse_layout(layout or "", policy.max_workers)
    num_wished = wish.num_model_ranks * prod(wish.data_axes or (1,))
    if num_wished > policy.max_workers:
        raise UserError(
            f"--layout {layout} needs {num_wished} workers, --workers allows "
            f"{policy.max_workers}: raise one or lower the other"
        )
    return wish


def _refuse_impossible_layout(policy: Policy, wish: Wish, job: Job) -> None:
    """What cannot be formed even with all workers will never be."""
    capacity = Capacity(policy.max_workers)
    layout = plan_layout(None, capacity, wish, job, snapshots_cover=False)
    if isinstance(layout, Infeasible):
        raise LayoutRefused(f"--layout: {layout.reason}")


def _run_folder(asked: Asked) -> RunFolder:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    recipe = name_of(asked.recipe)
    last = (recipe.rpartition(":")[2] or recipe).rstrip("/").rpartition("/")[2]
    plain = re.sub(r"[^A-Za-z0-9]+", "-", last).strip("-") or "run"
    name = f"{plain}-{stamp}" if asked.run_name is None else asked.run_name
    return RunFolder.of(asked.storage, name)


def _refuse_other_maths(
    folder: RunFolder, recipe: dict[str, Any], settings: TrainSettings
) -> tuple[str, ...]:
    """A stored run of that name may not compute something else. What only may is told."""
    try:
        stored = folder.recipe()
    except OSError as error:
        raise UserError(f"--storage {folder.storage}: cannot be read ({error})") from None
    if stored is None:
        return ()
    old = _stored_settings(folder, stored)
    differing = differing_maths(old, settings)
    if stored.get("data_digest") == recipe["data_digest"]:  # then they may have been moved
        differing = [told for told in differing if not told.startswith("data.source: ")]
    differing += [
        f"{key}: {stored.get(key)} -> {recipe.get(key)}"
        for key in ("num_samples", "data_digest", "arguments")
        if (stored.get(key) or {}) != (recipe.get(key) or {})
    ]
    if stored.get(STATE_DIGEST) != recipe.get(STATE_DIGEST):
        differing.append("the state has other names, shapes or dtypes")
    if differing:
        raise UserError(
            f"run '{folder.name}' in {folder.storage} was begun with other maths "
            f"({'; '.join(differing)}): resume it unchanged, or choose another --run-name"
        )
    return tuple(filter(None, [changed_source(stored, recipe)]))


def _stored_settings(folder: RunFolder, stored: dict[str, Any]) -> TrainSettings:
    """Those of recipe.json. Raises `UserError`, which says how to go on."""
    try:
        return TrainSettings.model_validate(stored["settings"])
    except KeyError:
        raise damaged_file(folder.files, RECIPE) from None
    except ValidationError as error:
        problem = f"settings: {first_problem(error)}"
        raise damaged_file(folder.files, RECIPE, problem) from None


def _refuse_unusable(folder: RunFolder) -> None:
    """Raises `UserError` for storage that cannot be reached or written."""
    path = folder.path
    if path is None:
        try:
            refuse_unreachable(folder.url)
        except OSError as error:
            raise UserError(f"--storage {folder.storage}: cannot be reached ({error})") from None
        return  # to try to write would cost as much as `store_recipe` does
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if not nearest.is_dir():
        raise _unwritable(folder, f"{nearest} is no folder")
    if not os.access(nearest, os.W_OK):
        raise _unwritable(folder, f"no permission to write in {nearest}")


def store_recipe(plan: Plan) -> None:
    """Make the run's folder and write `recipe.json`. Raises `UserError`."""
    folder = plan.folder
    try:
        folder.files.write(RECIPE, json.dumps(plan.recipe, indent=1).encode())
    except OSError as error:
        raise _unwritable(folder, error.strerror or str(error)) from None


def _unwritable(folder: RunFolder, why: str | None) -> UserError:
    return UserError(f"--storage {folder.storage}: cannot be written ({why}); name one that can")
