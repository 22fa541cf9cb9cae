"""`ElasticTrainer`: what `elastic train` does, in the terms of Ray Train."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray.train import Result, RunConfig, ScalingConfig
from rich.console import Console

from actors.ray_backend.tune_trial import trainable_of
from pipelines.api.configs import RunOptions, Scaling, changes_of
from pipelines.api.live_run import LiveRun
from pipelines.api.result import ended, in_terms_of_python
from pipelines.api.trial import StepReports
from pipelines.run.drive import Interrupts, follow, plan_here, tell_place, under_way
from pipelines.run.plan import RunPlan, TrainRequest
from pipelines.run.recipes import RecipeLike, load, name_of
from pipelines.settings.errors import UserError


class ElasticTrainer:
    """Trains a recipe on workers that may come and go.

    `recipe` is a name, `file.py:function`, a function that returns `TrainSettings` or a `Recipe`
    of your own model, one of these itself, or a function of a run that owns its loop; a function
    gets the arguments of `recipe_config` by name.
    `scaling_config` says how many workers, `(2, 8)` for any number from 2 to 8, and what each asks
    the cluster for; `run_config` the run's name, with which it is resumed, and its storage.
    `layout` is wished for when all workers are there, as `dp=2,fsdp=2`; `steps` is where to stop;
    `set` overrides fields of the recipe, as `{"optimizer.lr": 1e-3}`. With `verbose=0` nothing is
    shown. The others are those of `elastic train`.

    Raises `UserError` for what a run knows nothing of.
    """

    def __init__(
        self,
        recipe: RecipeLike,
        *,
        recipe_config: Mapping[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        layout: str | None = None,
        steps: int | None = None,
        data: str | None = None,
        set: Mapping[str, Any] | None = None,
        audit_every: int | None = None,
        inject: Sequence[str] = (),
        record_samples: bool = False,
        tracking_uri: str | None = None,
        experiment: str = "elastic",
        interface: str | None = None,
        ports: str | None = None,
        notify: str | None = None,
        verbose: int = 1,
    ) -> None:
        scaling, running = Scaling.of(scaling_config), RunOptions.of(run_config)
        self._verbose = verbose
        self._asked = TrainRequest(
            recipe=recipe,
            arguments=dict(recipe_config or {}),
            run_name=running.name,
            storage=running.storage,
            workers=scaling.workers,
            per_worker=scaling.per_worker,
            layout=layout,
            steps=steps,
            data=data,
            changes=(*scaling.changes, *running.changes, *changes_of(set or {})),
            audit_every=audit_every,
            inject=tuple(inject),
            record_samples=record_samples,
            tracking_uri=tracking_uri,
            experiment=experiment,
            interface=interface,
            ports=ports,
            notify=notify,
        )

    def fit(self) -> Result:
        """Train to the end, or go on with the run of this name.

        The first SIGINT or SIGTERM saves and ends the run, and is then raised as
        `KeyboardInterrupt` or `SystemExit`; only the main thread takes signals. Raises `UserError`
        for what is refused, `TrainingFailedError` with the user's traceback.
        """
        with in_terms_of_python():
            plan = plan_here(self._asked)
            console = Console() if self._verbose else None
            interrupts = Interrupts()
            try:
                if console:
                    tell_place(plan, console)
                with under_way(plan, joined=interrupts.listen) as drive_:
                    progress = follow(plan, drive_, console, lambda: interrupts.pass_on(drive_))
            finally:
                interrupts.give_back()
        if interrupts.number == signal.SIGINT:
            raise KeyboardInterrupt
        if interrupts.number:
            raise SystemExit(128 + interrupts.number)
        return ended(plan.folder, progress)

    def start(self) -> LiveRun:
        """Begin, or go on, and return at once. Raises `UserError` for what is refused."""
        return LiveRun(self._plan())

    def as_trainable(self, report_every: int = 1) -> Any:
        """What `ray.tune.Tuner` takes: each trial is a run that has the trial's name.

        The parameter space overrides fields of the recipe, as `set` does; below `recipe_config` it
        overrides arguments of the recipe's function. Every `report_every`-th step is reported; when
        a scheduler ends the trial, the run saves and ends. Raises `UserError` for a recipe that
        there is not.
        """
        if report_every < 1:
            raise UserError(f"report_every={report_every}: give 1 or more")
        with in_terms_of_python():
            load(self._asked.recipe, self._asked.arguments)
        here = os.getcwd()

        def begin(trial_name: str, config: dict[str, Any]) -> StepReports:
            with suppress(OSError):  # on another machine it may not be there
                os.chdir(here)  # Tune's trials are elsewhere, and paths are the script's
            return StepReports(self._plan(trial_name, config), report_every)

        return trainable_of(begin, name_of(self._asked.recipe).rpartition(":")[2])

    def _plan(
        self, run_name: str | None = None, config: Mapping[str, Any] | None = None
    ) -> RunPlan:
        values = dict(config or {})
        arguments = {**self._asked.arguments, **values.pop("recipe_config", {})}
        changes = (*self._asked.changes, *changes_of(values))
        name = run_name or self._asked.run_name
        request = replace(self._asked, changes=changes, arguments=arguments, run_name=name)
        with in_terms_of_python():
            return plan_here(request)
